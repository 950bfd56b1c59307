"""The tokens of prompts are learnt for each model from the usage that engines report."""

import asyncio
import csv
import json
import random
from pathlib import Path
from statistics import median

import pytest
from admission_bench import admission_over
from direct_calls import DirectPool, arrival
from script_fleet import OpenFleet, ended, until

from picker_fleet.domain.config import parse
from picker_fleet.domain.request import UNLEARNED, InferenceRequest
from picker_fleet.ingress.intake import Intake, read_body
from picker_fleet.state.accounting_token import Keyring

CONFIG = {"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 1e6}}
TABLE = Path(__file__).parents[1] / "data" / "prompt_tokens.csv"
ROWS = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
TEMPLATE_TOKENS = 12  # tokens that a chat template adds to a message


def chat(row: dict[str, str]) -> bytes:
    """A chat body whose message has as many bytes, and as many digits and marks, as the text of `row`."""
    count, marks = int(row["bytes"]), int(row["marks"])
    text = "".join("p."[(n + 1) * marks // count > n * marks // count] for n in range(count))
    about = {"model": "m", "temperature": 0.7, "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps({**about, "messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize("tokenizer", ["tekken", "v1"])
async def test_estimates_of_prompts_are_good_to_15_percent_after_200_requests(
    fleet: OpenFleet, tokenizer: str
) -> None:
    rows = random.Random(1).sample(ROWS, len(ROWS))
    asks = [read_body(chat(row)) for row in rows]
    real = [int(row[tokenizer]) + TEMPLATE_TOKENS for row in rows]
    async with fleet("a", upper_per=1e6) as (it, a):
        gate = admission_over(a.store, a.metrics, a.cell, replica="a", keys=a.keys, config=CONFIG)
        names = map("r{}".format, range(len(rows)))

        async def requests() -> list[InferenceRequest]:
            """The requests as a newly started replica reads them."""
            lines = (await it.state()).prompt_lines
            intake = Intake(
                parse(CONFIG),
                new_id=lambda: next(names),
                keys=Keyring(),
                prompt_line=lambda model: lines.get(model, UNLEARNED),
            )
            return [intake.request(each, {}, subset=None, trusted=False) for each in asks]

        def error(estimated: list[InferenceRequest]) -> float:
            assert all(each.learn for each in estimated)  # the cost leaves out the answer
            return median(abs(each.cost / tokens - 1) for each, tokens in zip(estimated, real, strict=True))

        first = await requests()
        placed = await asyncio.gather(*(gate.admit(each, stream_owned=False) for each in first))
        for request, placement, tokens in zip(first, placed, real, strict=True):
            usage = {"prompt_tokens": tokens, "completion_tokens": 7}
            end = ended(request.id)._replace(accounting_token=placement.accounting_token, **usage)
            gate.settle(end)
        await until(it.at_rest)
        names = map("again{}".format, range(len(rows)))
        assert error(await requests()) < 0.15


def test_a_few_wrong_figures_hardly_change_the_estimated_cost_of_a_prompt(direct: DirectPool) -> None:
    direct.publish("e1:1")

    def learn(size: int, tokens: int, model: str = "m") -> None:
        direct.call("admit", "a", arrival("r", model=model))
        direct.call("settle", "a", "r", "completed", tokens + 1, 1, size, "")

    def lines() -> dict[str, tuple[float, float]]:
        found = [each.decode() for each in direct.call("state", 1000)[-1]]
        return {
            name: (float(b), float(s)) for name, b, s in zip(*(found[n::3] for n in range(3)), strict=True)
        }

    sizes = (40, 100, 400, 1000, 4000)
    for size in sizes * 60:
        learn(size, 20 + size // 5)
    base, slope = lines()["m"]
    assert (base, slope) == (pytest.approx(20, rel=0.05), pytest.approx(0.2, rel=0.02))
    for size, tokens in ((40, 10**6), (4000, 1), (1, 10**9)):
        learn(size, tokens)
    base, slope = lines()["m"]
    for size in sizes:
        assert base + slope * size == pytest.approx(20 + size / 5, rel=0.3)
    # The pool learns the prompts of at most 256 models.
    for n in range(260):
        learn(100, 30, f"m{n}")
    assert len(lines()) == 256
