"""A benchmark's page in a real browser: what people see, on a phone, in the dark, by ear."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Page, async_playwright, expect

from millpond.bench import resampling
from millpond.bench.analysis import analyse
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Plan, Record, Sample
from millpond.bench.report import report_html
from millpond.bench.scenario import Design, Mixed, Moved, Scenario, Sessions
from tests.conftest import chromium
from tests.unit.bench_values import noisy, period, sample

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.timeout(120)]

TIMEOUT_MS = 20_000.0
DESKTOP, PHONE = (1280, 900), (400, 740)
NUM_CHARTS = {
    "Does sharing pay?": 1,
    "Sessions, turn by turn": 1,
    "Time to first token, by period": 6,
    "Time to first token, distribution": 6,
}
SCENARIO = Scenario(
    name="seen",
    description="for a browser",
    workload=(
        Moved(lengths=(4000,), prompts=9),
        Sessions(
            name="talk",
            placement="alternate",
            initial_tokens=(2000,),
            sessions=5,
            turns=4,
            growth_tokens=1,
            output_tokens=1,
        ),
        Mixed(name="mix", moved_shares=(0.0, 0.5, 1.0), tokens=100, prompts=4),
    ),
)


def samples(plan: Plan) -> list[Sample]:
    """Return requests of all kinds; one has failed, and one is far from all others."""
    gain = {"off": 1.0, "millpond": 4.0, "lmcache": 2.0, "vllm-fs": 1.2}[plan.cache]
    times = noisy(lambda _plan, _i: 400.0, share=0.05, seed=plan.number)

    def one(number: int, group: str, unit: int, turn: int) -> Sample:
        role = "moved" if turn else "cold"
        ttft_ms = times(plan, number) / (gain if turn else 1.0)
        key = f"{group}/{unit}/{turn}"
        return sample(
            number, ttft_ms, group=group, unit=f"{group}/{unit}", key=key, turn=turn, role=role
        )

    sizes = [("moved 4000", 9, 2), ("talk 2000", 5, 4)]
    sizes += [(f"mix {share}", 4, 2) for share in ("0", "0.5", "1")]
    places = [
        (group, unit, turn)
        for group, num_units, num_turns in sizes
        for unit in range(num_units)
        for turn in range(num_turns)
    ]
    found = [one(number, *place) for number, place in enumerate(places)]
    if plan.number == 5:
        found[3].ttft_ms, found[3].error = None, "lost"
        found[1].ttft_ms = 4000.0
    return found


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plans = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond", "lmcache", "vllm-fs"])
    made: Sequence[Period] = [period(plan, samples(plan)) for plan in plans]
    facts: dict[str, object] = {"command": "millpond bench run seen " + "--flag value " * 20}
    record = Record(scenario=SCENARIO, options={}, facts=facts, periods=list(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resampling, "RESAMPLES", 200)
        text = report_html(record, analyse(made))
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


@dataclass
class Seen:
    """A page in a browser, what went wrong in it, and what it asked for."""

    page: Page
    problems: list[str] = field(default_factory=list[str])
    asked: list[str] = field(default_factory=list[str])


@asynccontextmanager
async def seen(
    path: Path,
    size: tuple[int, int] = DESKTOP,
    *,
    scheme: Literal["light", "dark"] = "light",
) -> AsyncIterator[Seen]:
    """Open the page; nothing may go wrong in it, and nothing be fetched."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), timeout=60_000)
        context = await browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        made = Seen(await context.new_page())
        made.page.on("pageerror", lambda error: made.problems.append(str(error)))
        made.page.on("console", lambda message: made.problems.append(message.text))
        made.page.on("request", lambda request: made.asked.append(request.url))
        await made.page.goto(path.as_uri(), timeout=TIMEOUT_MS)
        yield made
        assert made.problems == []
        assert made.asked == [path.as_uri()]
        await browser.close()


def test_its_plots_are_there_and_say_in_words_what_they_show(page_file: Path) -> None:
    async def scene() -> None:
        async with seen(page_file) as found:
            for title, num_charts in NUM_CHARTS.items():
                section = found.page.locator("section").filter(
                    has=found.page.get_by_role("heading", name=title, exact=True)
                )
                plots = section.locator("svg.plot[role=img]")
                await expect(plots).to_have_count(num_charts)
                for i in range(num_charts):
                    box = await plots.nth(i).bounding_box()
                    assert box is not None
                    assert box["width"] > 200
                    assert box["height"] > 150
                    words = await plots.nth(i).get_attribute("aria-label") or ""
                    assert re.search(r"millpond .*\d", words), words
            turns = found.page.get_by_role("img", name=re.compile("^talk 2000: median time"))
            words = await turns.get_attribute("aria-label") or ""
            assert re.search(r"off \d+ ms → \d+ ms; millpond \d+ ms → [\d.]+ ms", words), words
            first = found.page.locator("ul.first li").first
            await expect(first).to_contain_text("millpond against off: moved requests")

    asyncio.run(scene())


CONTRAST = """() => {
  const numbers = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = (color) => {
    const [r, g, b] = numbers(color).map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const ratio = (color) => {
    const two = [light(color), paper];
    return (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
  };
  const shown = (selector) => [...document.querySelectorAll(selector)]
    .filter((node) => node.getClientRects().length);
  const texts = shown("h1, h2, h3, p, li, th, td, dt, dd, pre, figcaption span")
    .filter((node) => node.textContent.trim())
    .map((node) => [ratio(getComputedStyle(node).color), node.textContent.trim().slice(0, 40)]);
  const letters = shown("svg.plot text")
    .map((node) => [ratio(getComputedStyle(node).fill), node.textContent]);
  const lines = shown("svg.plot path.line, svg.plot path.median, svg.plot path.knots")
    .map((node) => [ratio(getComputedStyle(node).stroke), node.getAttribute("class")]);
  return {texts: [...texts, ...letters], lines};
}"""
"""WCAG's contrast of each text and of each line of a plot with the page."""

SIDEWAYS = """() => {
  const width = document.documentElement.clientWidth;
  const cut = [...document.querySelectorAll("svg.plot text, figcaption span, h1, h2, h3, li, dd")]
    .filter((node) => node.textContent.trim() && !node.closest(".wide"))
    .map((node) => [node.textContent.trim().slice(0, 40), node.getBoundingClientRect()])
    .filter(([, box]) => box.left < -0.5 || box.right > width + 0.5)
    .map(([text, box]) => [text, box.left, box.right]);
  return [document.documentElement.scrollWidth - width, cut];
}"""
"""How far the page scrolls sideways, and what is cut off; wide tables scroll in their own box."""

SMALLEST = """() => Math.min(...[...document.querySelectorAll("body *")]
  .filter((node) => node.getClientRects().length && node.textContent.trim())
  .map((node) => parseFloat(getComputedStyle(node).fontSize)))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read(
    page_file: Path, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    async def scene() -> None:
        async with seen(page_file, size, scheme=scheme) as found:
            contrast = await found.page.evaluate(CONTRAST)
            assert len(contrast["texts"]) > 200
            assert len(contrast["lines"]) > 50
            assert [each for each in contrast["texts"] if each[0] < 4.5] == []
            assert [each for each in contrast["lines"] if each[0] < 3] == []
            assert await found.page.evaluate(SIDEWAYS) == [0, []]
            assert await found.page.evaluate(SMALLEST) >= 12
            paper = await found.page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightest = max(int(part) for part in re.findall(r"\d+", paper)[:3])
            assert (brightest < 64) == (scheme == "dark")

    asyncio.run(scene())
