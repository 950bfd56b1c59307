// The decision log, newest first.

import { read } from "./api.js";
import { byId, el, plain, setText } from "./dom.js";
import { clock, number } from "./format.js";

const MAX_ENTRIES = 200;
const CONFIG_INTERVAL_MS = 15000;
const FAILURES = new Set(["refused", "expired", "preempted", "evicted", "abandoned", "reclaimed", "upstream_failed", "client_gone"]);

const list = byId("rows-decisions");
let onHold = null; // entries that arrived while the list is on hold
let skipped = 0;
let on = null;

export function takeDecisions({ entries, skipped: more }) {
  skipped += more ?? 0;
  if (onHold) onHold = [...onHold, ...entries].slice(-MAX_ENTRIES);
  else add(entries);
  count();
}

function add(entries) {
  if (!entries.length) return;
  list.prepend(...entries.slice(-MAX_ENTRIES).reverse().map(line));
  while (list.children.length > MAX_ENTRIES) list.lastElementChild.remove();
}

function line(entry) {
  const item = el("li");
  const at = item.appendChild(el("time", "", `${clock(entry.at)}.${String(Math.floor((entry.at * 10) % 10))}`));
  at.dateTime = new Date(entry.at * 1000).toISOString();
  item.appendChild(el("span", FAILURES.has(entry.event) ? "warn" : "", entry.event));
  const rest = item.appendChild(el("span", "rest"));
  const facts = [
    entry.flow && `${entry.band ?? ""} ${entry.flow}`.trim(),
    entry.endpoint && `→ ${entry.endpoint}`,
    entry.by && `by ${entry.by}`,
    entry.note && `note ${entry.note}`,
    `in flight ${number(entry.stock)}, waiting ${number(entry.queued, 0)}`,
    entry.request,
  ];
  rest.appendChild(el("bdi", "", plain(facts.filter(Boolean).join(" · "))));
  rest.title = rest.textContent;
  return item;
}

function count() {
  const missed = onHold ? `on hold, ${number(onHold.length, 0)} newer` : list.children.length ? `the last ${number(list.children.length, 0)}` : "";
  const lost = skipped ? `${number(skipped, 0)} more than could be shown` : "";
  setText(byId("count-decisions"), [missed, lost].filter(Boolean).join("; "));
  const empty = byId("none-decisions");
  empty.hidden = list.children.length > 0;
  setText(empty, on === false
    ? "The decision log is off. It is turned on by decision_log: {enabled: true} in the replicas' configuration; picker audit reads it too."
    : "No decision yet.");
}

async function readConfig() {
  try {
    on = (await read("config")).config.decision_log.enabled;
  } catch {
    on = null; // not known
  }
  count();
}

export function startDecisions() {
  const button = byId("decisions-hold");
  button.addEventListener("click", () => {
    const missed = onHold;
    onHold = onHold ? null : [];
    button.setAttribute("aria-pressed", String(onHold !== null));
    if (missed) add(missed);
    count();
  });
  readConfig();
  setInterval(() => !document.hidden && !list.children.length && readConfig(), CONFIG_INTERVAL_MS);
}
