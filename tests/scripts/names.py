"""Names as clients and operators may give them: every character that a name can have."""

from hypothesis import strategies as st

# What a key, a list, a row or a pattern could be joined by or read as. Short names of few characters, so that
# two of them joined by one of these are often two others joined by it.
_MARKS = ":{}|*% ,=[]\\?\"'é🙂-a"


NAMES = st.one_of(
    st.text(st.sampled_from(_MARKS), min_size=1, max_size=3),
    st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12),
).filter(lambda name: name.strip() and len(name.encode()) <= 128)
REQUEST_IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,20}", fullmatch=True)


def distinct(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(NAMES, min_size=count, max_size=count, unique=True)
