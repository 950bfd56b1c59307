"""Hypothesis strategies for names that clients and operators choose, with every allowed character."""

from hypothesis import strategies as st

# Characters that might separate the parts of a key, list, row or pattern. Names are short and use few
# characters, so that two different pairs of names often become one string if such a character joins them.
_MARKS = ":{}|*% ,=[]\\?\"'é🙂-a"


NAMES = st.one_of(
    st.text(st.sampled_from(_MARKS), min_size=1, max_size=3),
    st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=12),
).filter(lambda name: name.strip() and len(name.encode()) <= 128)
REQUEST_IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,20}", fullmatch=True)


def distinct(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(NAMES, min_size=count, max_size=count, unique=True)
