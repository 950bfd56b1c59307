// The decision log as it is written, newest first.

import { read } from "./api.js";
import { byId, el, plain, say } from "./dom.js";
import { clock, number } from "./format.js";

const MOST = 200;
const LOOK_MS = 15000;
const UNKIND = new Set(["refused", "expired", "preempted", "evicted", "abandoned", "reclaimed", "upstream_failed", "client_gone"]);

const list = byId("rows-decisions");
let held = null; // what came while the list was held
let skipped = 0;
let on = null;

export function takeDecisions({ entries, skipped: more }) {
  skipped += more ?? 0;
  if (held) held = [...held, ...entries].slice(-MOST);
  else add(entries);
  count();
}

function add(entries) {
  if (!entries.length) return;
  list.prepend(...entries.slice(-MOST).reverse().map(line));
  while (list.children.length > MOST) list.lastElementChild.remove();
}

function line(entry) {
  const item = el("li");
  const at = item.appendChild(el("time", "", `${clock(entry.at)}.${String(Math.floor((entry.at * 10) % 10))}`));
  at.dateTime = new Date(entry.at * 1000).toISOString();
  item.appendChild(el("span", UNKIND.has(entry.event) ? "warn" : "", entry.event));
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
  const news = held ? `held, ${number(held.length, 0)} newer` : list.children.length ? `the last ${number(list.children.length, 0)}` : "";
  const lost = skipped ? `${number(skipped, 0)} more than could be shown` : "";
  say(byId("count-decisions"), [news, lost].filter(Boolean).join("; "));
  const empty = byId("none-decisions");
  empty.hidden = list.children.length > 0;
  say(empty, on === false
    ? "The decision log is off. It is turned on by decision_log: {enabled: true} in the replicas' configuration; picker audit reads it too."
    : "No decision yet.");
}

async function look() {
  try {
    on = (await read("config")).config.decision_log.enabled;
  } catch {
    on = null; // not known: nothing is claimed
  }
  count();
}

export function startDecisions() {
  const button = byId("decisions-hold");
  button.addEventListener("click", () => {
    const news = held;
    held = held ? null : [];
    button.setAttribute("aria-pressed", String(held !== null));
    if (news) add(news);
    count();
  });
  look();
  setInterval(() => !document.hidden && !list.children.length && look(), LOOK_MS);
}
