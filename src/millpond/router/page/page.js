// The live page: asks the router for its state every two seconds and shows it.
// Whatever comes from there is put in as text, never as markup: clients choose names.
"use strict";

const EVERY_MS = 2000;
const PATIENCE_MS = 5000;
const HERE = location.pathname.replace(/\/+$/, "");
const SOURCES = {
  computed: "computed", local: "own cache", "pool-own": "pool, own", "pool-other": "pool, other",
};
// Shapes beside colours, about the origin and 8 wide.
const SHAPES = {
  computed: "M-4 -4H4V4H-4Z", local: "M0 -5L5 0L0 5L-5 0Z",
  "pool-own": "M0 -5L5 4H-5Z", "pool-other": "M-4.4 0A4.4 4.4 0 1 0 4.4 0A4.4 4.4 0 1 0 -4.4 0Z",
};
const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// ---------------------------------------------------------------- words and figures

function count(number) {
  if (number < 10000) return String(Math.round(number));
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= unit * 0.9995) return `${Number((number / unit).toPrecision(3))}${name}`;
  }
  return String(number);
}

function seconds(ms) {
  if (ms < 999.5) return `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return `${Number((ms / 1000).toPrecision(3))} s`;
}

function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

function span(s) {
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (s >= unit) return `${Math.floor(s / unit)} ${name}`;
  }
  return `${Math.max(0, Math.floor(s))} s`;
}

// ---------------------------------------------------------------- parts of tables

function number(value, name = "td", attributes = {}) {
  const cell = element(name, { class: "num", ...attributes }, value === null ? "–" : count(value));
  if (value !== null && value >= 10000) cell.title = value.toLocaleString("en");
  if (!value) cell.classList.add("zero");
  return cell;
}

function mark(source) {
  const box = drawn("svg", { class: "mark", viewBox: "-6 -6 12 12", "aria-hidden": "true" });
  box.append(drawn("path", { d: SHAPES[source], class: source }));
  return box;
}

function fill(table, rows, nothing, numColumns) {
  const body = table.tBodies[0];
  if (!rows.length) {
    rows = [element("tr", {}, element("td", { colspan: numColumns, class: "empty" }, nothing))];
  }
  body.replaceChildren(...rows);
}

// ---------------------------------------------------------------- sections

function showAbout(state) {
  const served = state.replicas.reduce((sum, each) => sum + each.num_requests, 0);
  byId("about").textContent = [
    `policy ${state.policy}`, `pool ${state.pool}`, `identity ${state.prefix_identity}`,
    `${count(served)} requests`, `up ${span(state.now - state.started_at)}`, state.version,
  ].join(" · ");
}

function showVerdict(verdict) {
  byId("verdict").dataset.finding = verdict.finding;
  byId("sentence").textContent = verdict.sentence;
  byId("counted").textContent = verdict.counted;
}

function showReplicas(replicas) {
  const classes = { ready: "good", starting: "warn", down: "bad" };
  const rows = replicas.map((each) => {
    const kept = each.state === "ready" ? "" : `${each.state}, `;
    const state = each.is_draining ? `${kept}draining` : each.state;
    return element("tr", {},
      element("th", { scope: "row" }, each.name),
      element("td", { class: each.is_draining ? "warn" : classes[each.state] }, state),
      number(each.num_running), number(each.queued_tokens), number(each.num_requests));
  });
  fill(byId("replicas"), rows, "No replicas.", 5);
}

function showSources({ num_reported: numReported, prompt_tokens: tokens }) {
  const readers = Object.keys(tokens);
  const writers = [...new Set(readers.flatMap((each) => Object.keys(tokens[each].writers)))].sort();
  const shown = writers.length ? writers : ["–"];
  const table = byId("sources");
  byId("sources-note").textContent = `Of the last ${numReported} requests that were reported: a line`
    + " for each replica that read, a column for each that had written to the pool.";
  table.tHead.replaceChildren(
    element("tr", {},
      element("th", { scope: "col", rowspan: 2 }, "Read by"),
      element("th", { scope: "col", rowspan: 2, class: "num" }, mark("computed"), "Computed"),
      element("th", { scope: "col", rowspan: 2, class: "num" }, mark("local"), "Own cache"),
      element("th", { scope: "colgroup", colspan: shown.length, class: "group" }, "Pool, written by")),
    element("tr", {}, ...shown.map((each) => element("th", { scope: "col", class: "num" }, each))));
  const rows = readers.map((reader) => element("tr", {},
    element("th", { scope: "row" }, reader),
    number(tokens[reader].computed), number(tokens[reader].local),
    ...shown.map((writer) => {
      const cell = number(tokens[reader].writers[writer] ?? 0);
      const source = writer === reader ? "pool-own" : "pool-other";
      if (tokens[reader].writers[writer]) cell.prepend(mark(source));
      return cell;
    })));
  fill(table, rows, "No request was reported by its replica yet.", 3 + shown.length);
}

function showTimes(ttft) {
  const rows = ttft.groups.map((each) => element("tr", {},
    element("th", { scope: "row" }, mark(each.source), SOURCES[each.source]),
    number(each.num_requests), number(each.prompt_tokens_median),
    element("td", { class: "num" }, seconds(each.ttft_ms_median)),
    element("td", { class: "num" }, each.ttft_ms_p90 === null ? "–" : seconds(each.ttft_ms_p90))));
  fill(byId("ttft"), rows, "No stream was reported by its replica yet.", 5);
  drawDots(ttft.dots);
}

// Steps within a power of ten, the first that give an axis enough lines.
const STEPS = [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7], [1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9]];
const TICKS_MIN = 4;

function ticksBetween(low, high, steps) {
  const ticks = [];
  for (let ten = Math.floor(Math.log10(low)); ten <= Math.log10(high); ten += 1) {
    for (const step of steps) ticks.push(Number((step * 10 ** ten).toPrecision(3)));
  }
  return ticks.filter((each) => each >= low && each <= high);
}

function scale(values, from, to) {
  const low = Math.min(...values) / 1.2;
  const high = Math.max(...values) * 1.2;
  const choices = STEPS.map((steps) => ticksBetween(low, high, steps));
  const width = Math.log(high / low);
  return {
    at: (value) => from + (to - from) * (Math.log(value / low) / width),
    ticks: choices.find((ticks) => ticks.length >= TICKS_MIN) ?? choices.at(-1),
  };
}

function drawDots(all) {
  const picture = byId("dots");
  const dots = all.filter(([, tokens, ms]) => tokens > 0 && ms > 0);
  const [width, height] = [picture.clientWidth || 320, 240];
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const parts = [picture.firstElementChild];
  if (!dots.length) {
    parts.push(drawn("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
    picture.replaceChildren(...parts);
    return;
  }
  const across = scale(dots.map((each) => each[1]), 58, width - 12);
  const up = scale(dots.map((each) => each[2]), height - 26, 8);
  for (const tick of across.ticks) {
    const x = across.at(tick);
    parts.push(drawn("line", { class: "grid", x1: x, x2: x, y1: 8, y2: height - 26 }));
    parts.push(drawn("text", { x, y: height - 10, "text-anchor": "middle" }, count(tick)));
  }
  for (const tick of up.ticks) {
    const y = up.at(tick);
    parts.push(drawn("line", { class: "grid", x1: 58, x2: width - 12, y1: y, y2: y }));
    parts.push(drawn("text", { x: 52, y: y + 4, "text-anchor": "end" }, seconds(tick).replace(".0 ", " ")));
  }
  for (const [source, tokens, ms] of dots) {
    const place = `translate(${across.at(tokens).toFixed(1)} ${up.at(ms).toFixed(1)})`;
    parts.push(drawn("path", { d: SHAPES[source], class: `${source} mark-dot`, transform: place }));
  }
  picture.replaceChildren(...parts);
}

function bar(tokens) {
  const total = Object.values(tokens).reduce((sum, each) => sum + each, 0);
  const box = drawn("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  let x = 0;
  for (const source of Object.keys(SOURCES)) {
    const width = total ? (100 * tokens[source]) / total : 0;
    box.append(drawn("rect", { x, width, y: 0, height: 10, class: source }));
    x += width;
  }
  return box;
}

function showRequests(requests) {
  const known = { pool: "replica", "pool-ambiguous": "ambiguous", guessed: "guess" };
  const rows = requests.map((each) => {
    const cell = (label, content, attributes = {}) =>
      element("td", { role: "cell", "data-label": label, ...attributes }, content);
    const tokens = (label, source) => {
      const value = each.tokens === null ? null : each.tokens[source];
      return number(value, "td", { role: "cell", "data-label": label, class: "num tokens" });
    };
    const isFine = each.status === 200 && each.ended === "complete";
    // A client that goes is its own affair, and many go with the last event, before the end.
    const isBad = each.status !== 200 || !["complete", "client-gone"].includes(each.ended);
    const ended = each.ended === "complete" ? `${each.status}` : `${each.status ?? ""} ${each.ended}`.trim();
    return element("tr", { role: "row", class: each.attribution === "pool" ? "" : "is-guess" },
      cell("Time", clock(each.arrived_at), { title: new Date(each.arrived_at * 1000).toISOString() }),
      cell("Request", each.request_id, { class: "id", title: each.request_id }),
      cell("Replica", each.replica ?? "–"),
      cell("Prefix at", each.prefix_holder ?? "–"),
      cell("Moved", each.is_moved ? "moved" : "–", { class: each.is_moved ? "" : "none" }),
      cell("Sources", each.tokens === null ? "" : bar(each.tokens), { class: "sources" }),
      tokens("Computed", "computed"), tokens("Own cache", "local"),
      tokens("Pool, own", "pool-own"), tokens("Pool, other", "pool-other"),
      cell("First token", each.ttft_ms === null ? "–" : seconds(each.ttft_ms), { class: "num first" }),
      cell("Known by", known[each.attribution] ?? "–", { class: each.attribution === "pool" ? "usual" : "" }),
      cell("Ended", ended, { class: `ended ${isFine ? "usual" : ""} ${isBad ? "bad" : ""}` }));
  });
  fill(byId("requests"), rows, "No request yet.", 13);
}

// ---------------------------------------------------------------- asking again and again

const shown = new Map();
let latest = null;
let isPaused = false;
let timer = null;

// A section is drawn anew only when it has changed, so that a selection stays.
function update(name, part, show) {
  const text = JSON.stringify(part);
  if (shown.get(name) === text) return;
  show(part);
  shown.set(name, text);
}

function show(state) {
  latest = state;
  showAbout(state);
  update("verdict", state.verdict, showVerdict);
  update("replicas", state.replicas, showReplicas);
  update("sources", { num_reported: state.num_reported, prompt_tokens: state.prompt_tokens }, showSources);
  update("ttft", state.ttft, showTimes);
  update("requests", state.requests, showRequests);
}

function say(kind, text, problem) {
  document.body.className = kind;
  byId("as-of").textContent = text;
  const alert = byId("alert");
  // The same words again would be read out again.
  if (alert.textContent !== problem) alert.textContent = problem;
  alert.hidden = !problem;
}

function sayStale(why) {
  const since = latest === null ? "" : ` What is below is from ${clock(latest.now)}.`;
  say("is-stale", latest === null ? "no answer" : `stale, from ${clock(latest.now)}`, why + since);
}

async function fetched() {
  const options = { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" };
  try {
    const answer = await fetch(`${HERE}/state.json`, options);
    if (answer.ok) return { state: await answer.json() };
    if (answer.status === 401) {
      return { problem: "The router does not take the key any more: reload the page to enter it again." };
    }
    return { problem: `The router answers with an error (${answer.status}).` };
  } catch {
    return { problem: "The router does not answer." };
  }
}

async function ask() {
  clearTimeout(timer);
  if (isPaused || document.hidden) return;
  const { state, problem } = await fetched();
  if (isPaused) return;
  clearTimeout(timer);
  timer = setTimeout(ask, EVERY_MS);
  if (state === undefined) {
    sayStale(problem);
  } else {
    show(state);
    say("is-live", `live, ${clock(state.now)}`, "");
  }
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) say("", latest === null ? "paused" : `paused at ${clock(latest.now)}`, "");
  else ask();
});
document.addEventListener("visibilitychange", ask);
addEventListener("resize", () => latest !== null && drawDots(latest.ttft.dots));
byId("metrics").href = `${HERE}/metrics`;
byId("json").href = `${HERE}/state.json`;
ask();
