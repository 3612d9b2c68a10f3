"""The live page in a real browser: what people see, on a phone, in the dark, by keyboard."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.conftest import chromium
from tests.faults.router_process import Live, process_of
from tests.faults.router_traffic import BLOCK, PooledReplicas, ask
from tests.faults.router_world import (
    STREAM_HEAD,
    Call,
    Front,
    ScriptedReplica,
    answer,
    chunk,
    front,
    run,
    until,
)
from tests.faults.world import Daemon, short_folder

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

TIMEOUT_MS = 20_000.0
DESKTOP, PHONE = (1280, 900), (360, 740)
HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
expect.set_options(timeout=TIMEOUT_MS)


@dataclass
class Seen:
    """A page in a browser, what went wrong in it, and whence it got answers."""

    page: Page
    problems: list[str] = field(default_factory=list[str])
    answers: list[str] = field(default_factory=list[str])


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=chromium(), timeout=60_000)
        yield started
        await started.close()


@asynccontextmanager
async def seen(
    url: str,
    size: tuple[int, int] = DESKTOP,
    *,
    scheme: Literal["light", "dark"] = "light",
    key: str | None = None,
) -> AsyncIterator[Seen]:
    """Open the live page of a router; nothing may go wrong in it, and nobody else be asked."""
    async with browser() as started:
        context = await started.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            http_credentials=None if key is None else {"username": "any", "password": key},
        )
        made = Seen(await context.new_page())
        made.page.on("pageerror", lambda error: made.problems.append(str(error)))
        made.page.on("console", lambda message: made.problems.append(message.text))
        made.page.on("response", lambda answer: made.answers.append(answer.url))
        await made.page.goto(f"{url}/millpond", timeout=TIMEOUT_MS)
        await expect(made.page.locator("body")).to_have_class("is-live")
        yield made
        assert {each.partition("/millpond")[0] for each in made.answers} <= {
            url,
            "data:image/svg+xml",
        }


@pytest.fixture
def socket_path() -> Iterator[str]:
    with short_folder() as folder:
        yield str(Path(folder) / "pool.sock")


@asynccontextmanager
async def busy_router(socket_path: str, num_requests: int = 24) -> AsyncIterator[Front]:
    """Run a router whose replicas have served and shared; one is draining, and one is down."""
    async with AsyncExitStack() as stack:
        daemon = stack.enter_context(Daemon(socket_path))
        await asyncio.to_thread(daemon.wait_ready)
        made = PooledReplicas(
            stack.enter_context(ExitStack()), socket_path, "abc", s_per_token=5e-5
        )
        router = await stack.enter_async_context(front(*made.replicas, pool_socket=socket_path))
        await until(lambda: router.router._attributor.has_pool, "the router has found the pool")
        for i in range(num_requests):
            conversation, turn = i // 4, i % 4
            size = BLOCK * (1 + 2 * (conversation % 3) + turn) + 10 * turn
            await ask(router.session, router.url, conversation, size)
        made.replicas[2].health = 503
        router.router.replicas.drain("b")
        await until(lambda: not router.router.replicas["c"].is_available, "c is down")
        await router.logged(num_requests)
        yield router


def on_busy_router(
    socket_path: str, scenario: Callable[[Front], Coroutine[Any, Any, None]]
) -> None:
    async def scene() -> None:
        async with busy_router(socket_path) as router:
            await scenario(router)

    run(scene)


# ---------------------------------------------------------------- what it shows


def test_it_shows_what_the_router_knows(socket_path: str) -> None:
    async def scenario(router: Front) -> None:
        async with seen(router.url) as found:
            page = found.page
            requests = page.get_by_role("table", name="Last requests").get_by_role("row")
            await expect(requests).to_have_count(1 + 24)
            async with router.session.get(f"{router.url}/millpond/state.json") as reply:
                state = await reply.json()
            assert state["verdict"]["finding"] == "pays"
            await expect(page.locator("#sentence")).to_have_text(state["verdict"]["sentence"])
            replicas = page.get_by_role("table", name="Replicas with their state and load")
            for name, word in (("a", "ready"), ("b", "draining"), ("c", "down")):
                row = replicas.get_by_role("row", name=re.compile(f"^{name} {word} 0 0 8$"))
                await expect(row).to_have_count(1)
            sources = page.get_by_role("table", name="Prompt tokens by reading replica and source")
            for reader, own in state["prompt_tokens"].items():
                row = sources.get_by_role("row", name=re.compile(rf"^{reader} \d"))
                for num_tokens in (own["computed"], own["local"], *own["writers"].values()):
                    shown = str(num_tokens) if num_tokens < 10_000 else f"{num_tokens / 1000:.1f}k"
                    await expect(row).to_contain_text(shown)
            dots = page.locator("#dots .mark-dot")
            assert await dots.count() == len(state["ttft"]["dots"]) == 24
            times = page.get_by_role("table", name="Time to the first token by source")
            await expect(times.get_by_role("row")).to_have_count(1 + len(state["ttft"]["groups"]))
            assert found.problems == []

    on_busy_router(socket_path, scenario)


def test_it_goes_on_by_itself_and_pauses_when_told_to() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"{}"))
        async with front(replica) as router, seen(router.url) as found:
            page = found.page
            await expect(page.get_by_text("No request yet.")).to_be_visible()

            async def named(name: str) -> None:
                async with router.post({"prompt": "x"}, headers={"x-request-id": name}):
                    pass

            await named("first")
            await expect(page.get_by_role("cell", name="first", exact=True)).to_be_visible()
            # The keyboard reaches the button, and it says what it is.
            pause = page.get_by_role("button", name="Pause")
            await page.keyboard.press("Tab")
            await expect(pause).to_be_focused()
            await page.keyboard.press("Enter")
            await expect(pause).to_have_attribute("aria-pressed", "true")
            await expect(page.locator("#as-of")).to_contain_text("paused at")
            num_answers = len(found.answers)
            await named("second")
            await page.wait_for_timeout(3000)  # longer than it leaves between two questions
            assert len(found.answers) == num_answers
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("cell", name="second", exact=True)).to_be_visible()
            assert found.problems == []

    run(scenario)


def test_names_that_clients_choose_are_text() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a")) as router:
            async with router.post({"prompt": "x"}, headers={"x-request-id": HOSTILE}):
                pass
            await router.logged(1)
            async with seen(router.url) as found:
                cell = found.page.locator("#requests td.id")
                await expect(cell).to_have_text(HOSTILE)
                assert await cell.locator("*").count() == 0
                assert await found.page.title() == "Millpond router"
                # Were it ever put in as markup, the policy would still not let it run.
                await found.page.evaluate(
                    "name => { document.querySelector('#counted').innerHTML = name }", HOSTILE
                )
                blocked = "Content Security Policy"
                await until(lambda: any(blocked in each for each in found.problems), blocked)
                assert await found.page.title() == "Millpond router"

    run(scenario)


def test_guesses_and_failures_look_like_it() -> None:
    async def broken(call: Call) -> None:
        call.write(STREAM_HEAD + chunk(b"data: half an ev"))
        await call.drain()
        call.kill()

    async def scenario() -> None:
        replica = ScriptedReplica("a")
        async with front(replica) as router, seen(router.url, (1100, 800)) as found:
            async with router.post({"prompt": "x" * 3000}) as reply:
                await reply.read()
            replica.script = broken
            with pytest.raises(aiohttp.ClientPayloadError):
                async with router.post({"prompt": "x" * 3000}) as reply:
                    await reply.read()
            rows = found.page.get_by_role("table", name="Last requests").get_by_role("row")
            await expect(rows).to_have_count(3)
            failed, guessed = rows.nth(1), rows.nth(2)
            await expect(failed.get_by_role("cell", name="200 replica-gone")).to_have_class(
                re.compile(r"\bbad\b")
            )
            await expect(guessed.get_by_role("cell", name="guess")).to_be_visible()
            await expect(guessed.locator(".tokens").first).to_have_css("font-style", "italic")
            await expect(found.page.locator("#sentence")).to_contain_text("no pool answers")
            assert await found.page.evaluate(OVERHANGS) == []
            assert found.problems == []

    run(scenario)


# ---------------------------------------------------------------- on a phone, in the dark

CONTRAST = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return /, 0\\)$/.test(color) ? ground(node.parentElement) : color;
  };
  const texts = [...document.querySelectorAll("h1, h2, p, th, td, a, button, figcaption")]
    .filter((node) => node.textContent.trim() && node.getClientRects().length);
  return texts.map((node) => {
    const two = [light(getComputedStyle(node).color), light(ground(node))];
    const ratio = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
    return [Math.round(ratio * 100) / 100, node.textContent.trim().slice(0, 40)];
  });
}"""
"""WCAG's contrast of each text with what is behind it."""

OVERHANGS = """() => [document.documentElement, ...document.querySelectorAll("section, .scroll")]
  .filter((node) => node.scrollWidth > node.clientWidth)
  .map((node) => [node.outerHTML.slice(0, 80), node.scrollWidth, node.clientWidth])"""
"""What would have to be scrolled sideways. Three replicas fit; more scroll in their own box."""


@pytest.mark.engines  # four loads of the page, a minute on two busy cores
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read(
    size: tuple[int, int], scheme: Literal["light", "dark"], socket_path: str
) -> None:
    async def scenario(router: Front) -> None:
        async with seen(router.url, size, scheme=scheme) as found:
            page = found.page
            contrasts = await page.evaluate(CONTRAST)
            assert len(contrasts) > 100
            assert [each for each in contrasts if each[0] < 4.5] == []
            luminance = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightest = max(int(part) for part in re.findall(r"\d+", luminance)[:3])
            assert (brightest < 64) == (scheme == "dark")
            assert await page.evaluate(OVERHANGS) == []
            # Cards on the phone are lines of a table all the same, for those who hear it.
            rows = page.get_by_role("table", name="Last requests").get_by_role("row")
            await expect(rows).to_have_count(1 + 24)
            await expect(rows.nth(1).get_by_role("cell", name="moved")).to_have_count(1)
            assert found.problems == []

    on_busy_router(socket_path, scenario)


# ---------------------------------------------------------------- a router that is away


def test_a_router_that_has_gone_is_said_to_be_and_one_that_returns_is_shown(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with (
            ScriptedReplica("a") as replica,
            process_of(tmp_path, [replica]) as router,
        ):
            await router.start()
            port = router.port
            async with seen(router.url) as found:
                alert = found.page.get_by_role("alert")
                await expect(alert).to_be_hidden()
                await router.stop(signal.SIGKILL)
                await expect(alert).to_contain_text("The router does not answer. What is below is")
                await expect(found.page.locator("body")).to_have_class("is-stale")
                await expect(found.page.locator("#as-of")).to_contain_text("stale, from")
                await expect(found.page.get_by_role("rowheader", name="a")).to_be_visible()
                await router.start(port)
                await expect(found.page.locator("body")).to_have_class("is-live")
                await expect(alert).to_be_hidden()
                await frozen(router, found)

    run(scenario)


async def frozen(router: Live, found: Seen) -> None:
    """A router that accepts and never answers is away as well."""
    assert router.process is not None
    router.process.send_signal(signal.SIGSTOP)
    try:
        await expect(found.page.locator("body")).to_have_class("is-stale")
    finally:
        router.process.send_signal(signal.SIGCONT)
    await expect(found.page.locator("body")).to_have_class("is-live")


def test_the_key_is_the_password() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a"), api_key="secret") as router:
            async with browser() as started:
                page = await started.new_page()
                with pytest.raises(Exception, match="ERR_INVALID_AUTH_CREDENTIALS"):
                    await page.goto(f"{router.url}/millpond")
            async with seen(router.url, key="secret") as found:
                await expect(found.page.get_by_role("rowheader", name="a")).to_be_visible()

    run(scenario)
