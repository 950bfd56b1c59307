// The queue, page by page, in the predicted dispatch order.

import { part, read } from "./api.js";
import { offer } from "./changes.js";
import { byId, el, setLevel, setName, plain, Rows, row, setText } from "./dom.js";
import { number, plural, seconds } from "./format.js";

const PAGE = 15;
const FOLLOW_MS = 2000;

const pages = [""]; // the cursors of the first page to the page shown
let after = null;
let busy = false;
let again = false;
let visible = false;
let lookUp = () => {};

const rows = new Rows(byId("rows-queue"), (request) => request.id, () => {
  const { tr, cells } = row("n", "name head", "name", "", "n", "n", "n", "n", "name", "act");
  const id = cells[1].appendChild(el("button", "link"));
  id.type = "button";
  const button = cells[9].appendChild(el("button", "", "Evict"));
  button.type = "button";
  let now = null;
  id.addEventListener("click", () => lookUp(now.id));
  button.addEventListener("click", () => evict(button, now));
  return {
    tr,
    update(request) {
      now = request;
      setText(cells[0], number(request.position, 0));
      setName(id, request.id);
      setName(cells[2], request.flow);
      setText(cells[3], request.band);
      setText(cells[4], request.overdue ? `${seconds(request.age_s)} overdue` : seconds(request.age_s));
      setLevel(cells[4], request.overdue ? "warn" : "");
      setText(cells[5], seconds(request.deadline_in_s));
      setText(cells[6], number(request.cost));
      setText(cells[7], number(request.score?.total, 3));
      const { score } = request;
      cells[7].title = score ? `wait ${number(score.wait, 3)}, criticality ${number(score.criticality, 3)}, rate ${number(score.rate, 3)}` : "";
      setName(cells[8], request.state === "orphaned" ? "none: its replica is silent" : (request.owner ?? "–"));
      button.setAttribute("aria-label", `Evict ${request.id}`);
    },
  };
});

async function evict(button, { id, flow, band, age_s: age }) {
  const done = await offer(button, {
    title: "Evict this request?",
    text: `Request ${plain(id)} of flow “${plain(flow)}” (${band}) has waited ${seconds(age)}. Its client gets a refusal at once.`,
    yes: "Evict",
    path: `requests/${part(id)}/evict`,
    done: `Request ${plain(id)} has left the queue.`,
  });
  if (done) await load();
}

async function load() {
  if (busy) {
    again = true; // the filter has changed meanwhile
    return;
  }
  busy = true;
  try {
    const page = await read("queue", { limit: PAGE, band: byId("queue-band").value, flow: byId("queue-flow").value, cursor: pages.at(-1) });
    if (!again) show(page);
  } catch (fault) {
    // A cursor may have become invalid while the page was open.
    if (fault.status >= 400 && fault.status < 500 && pages.length > 1) pages.length = 1;
    setText(byId("count-queue"), fault.message);
  } finally {
    busy = false;
  }
  if (!again) return;
  again = false;
  await load();
}

function show({ requests, total, cursor, order }) {
  after = cursor;
  rows.show(requests);
  const from = (pages.length - 1) * PAGE;
  const range = requests.length ? `, ${number(from + 1, 0)} to ${number(from + requests.length, 0)} shown` : "";
  setText(byId("count-queue"), typeof total === "number" ? `${plural(total, "request")}${range}` : range.slice(2));
  setText(byId("order-queue"), order ? `${order[0].toUpperCase()}${order.slice(1)}.` : "");
  byId("none-queue").hidden = requests.length > 0;
  byId("queue-back").disabled = pages.length === 1;
  byId("queue-next").disabled = !cursor;
}

function turn() {
  after = null; // unknown until the page has loaded
  byId("queue-follow").checked = pages.length === 1; // only the first page refreshes by itself
  load();
}

/** Starts the list; `look` is called with the id of a request that the operator clicks. */
export function startQueue(look) {
  lookUp = look;
  const first = (event) => {
    event.preventDefault();
    pages.length = 1;
    turn();
  };
  byId("queue-filter").addEventListener("submit", first);
  byId("queue-band").addEventListener("change", first);
  byId("queue-next").addEventListener("click", () => after && (pages.push(after), turn()));
  byId("queue-back").addEventListener("click", () => pages.length > 1 && (pages.pop(), turn()));
  new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting;
    if (visible && byId("queue-follow").checked) load();
  }, { rootMargin: "150px" }).observe(byId("queue"));
  setInterval(() => visible && !document.hidden && byId("queue-follow").checked && load(), FOLLOW_MS);
  load();
}
