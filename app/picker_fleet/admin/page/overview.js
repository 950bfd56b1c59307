// The overview: whether requests wait, why, and the figures of the whole fleet.

import { Chart, History } from "./chart.js";
import { byId, el, setLevel, plain, Rows, row, setText } from "./dom.js";
import { bytes, number, plural, seconds } from "./format.js";

const history = new History();
const BOUNDS = ["lower", "watermark", "upper"];
const charts = [
  new Chart(byId("chart-stock"), history, "stock", BOUNDS, byId("read-stock")),
  new Chart(byId("chart-queued"), history, "queued", [], byId("read-queued")),
];

const bands = new Rows(byId("rows-bands"), (band) => band.band, () => {
  const { tr, cells } = row("", "bar", "n", "n", "n", "n");
  const bars = cells[1].appendChild(el("span", "bars"));
  const fill = bars.appendChild(el("span", "meter")).appendChild(el("i"));
  const count = bars.appendChild(el("span"));
  return {
    tr,
    update(band) {
      setText(cells[0], band.band);
      cells[0].title = `priority ${band.priority}`;
      fill.style.width = `${band.most ? (100 * band.queued) / band.most : 0}%`;
      setText(count, number(band.queued, 0));
      count.title = band.capacity ? `at most ${number(band.capacity, 0)}` : "";
      setText(cells[2], bytes(band.queued_bytes) + (band.bytes ? ` of ${bytes(band.bytes)}` : ""));
      setText(cells[3], number(band.active_flows, 0));
      setText(cells[4], band.queued ? seconds(band.oldest_s) : "–");
      setText(cells[5], typeof band.weight === "number" ? number(band.weight) : "strict");
    },
  };
});

/** Updates the queue's band filter to the bands in use, and keeps the operator's choice. */
function offerBands(names) {
  const choice = byId("queue-band");
  const wanted = [...new Set([...names, choice.value])].filter(Boolean);
  const offered = [...choice.options].slice(1).map((option) => option.value);
  if (wanted.join("\n") === offered.join("\n")) return;
  const chosen = choice.value;
  choice.replaceChildren(choice.options[0], ...wanted.map((name) => new Option(name)));
  choice.value = chosen;
}

/** Adds a snapshot to the charts' history, also while the page is in the background. */
export function remember({ at, state }) {
  history.add({ at, stock: state.stock, queued: state.queued, ...state.bounds });
}

export function showOverview({ state, flows, endpoints, replicas }) {
  const ages = state.bands.filter((band) => band.queued && band.oldest_s !== null).map((band) => band.oldest_s);
  const oldest = ages.length ? Math.max(...ages) : null;
  const banner = byId("why");
  const [how, text] = why(state, flows, oldest);
  setText(banner, text);
  setLevel(banner, how);
  tiles(state, endpoints, replicas, oldest);
  const most = Math.max(...state.bands.map((band) => band.queued));
  bands.show(state.bands.map((band) => ({ ...band, most })));
  offerBands(state.bands.map((band) => band.band));
  facts(state);
  drawCharts(state);
}

/** Reports that the replica cannot read the shared state; the page keeps the old figures. */
export function showTrouble(detail) {
  setText(byId("why"), `This replica cannot read the shared state: ${plain(detail)}. The figures below are old.`);
  setLevel(byId("why"), "bad");
}

function drawCharts(state) {
  for (const chart of charts) chart.draw();
  const { points } = history;
  const spread = (key) => {
    const values = points.map((point) => point[key]);
    const [least, most] = [number(Math.min(...values)), number(Math.max(...values))];
    return `${least === most ? `always ${least}` : `${least} to ${most}`} over ${seconds(points.at(-1).at - points[0].at)}`;
  };
  const { lower, watermark, upper } = state.bounds;
  setText(byId("text-stock"), `${number(state.stock)} ${state.unit} now; ${spread("stock")}. Dispatch below ${number(lower)}, aim ${number(watermark)}, never above ${number(upper)} (red).`);
  setText(byId("text-queued"), `${plural(state.queued, "request")} now; ${spread("queued")}.`);
}

const named = (flow) => (flow.flow ? `flow “${plain(flow.flow)}”` : `band ${flow.band}`);

/** Returns the level and the sentence that says whether requests wait, and why. */
function why(state, flows, oldest) {
  const wait = `${plural(state.queued, "request")} ${state.queued === 1 ? "waits" : "wait"}`;
  const throttled = flows.filter((flow) => flow.throttled).length;
  const first = flows.reduce((most, flow) => ((flow.oldest_s ?? -1) > (most?.oldest_s ?? -1) ? flow : most), null);
  const longest = first ? ` Longest: ${seconds(oldest)}, ${named(first)}.` : "";
  const late = state.overdue ? ` ${number(state.overdue, 0)} overdue.` : "";
  if (state.degraded) return ["bad", "This replica works without the shared state, within its share of the bounds; the figures of the fleet may be old."];
  if (state.paused) return ["warn", `Dispatch is paused by an operator: ${state.queued ? wait : "nothing waits yet"}, and new requests will wait.${longest}`];
  if (!state.ready_backends) return [state.queued ? "bad" : "warn", `No endpoint takes requests${state.queued ? `: ${wait}` : ""}.${longest}`];
  if (!state.queued) return ["calm", `Nothing waits: ${number(state.stock)} of ${number(state.bounds.upper)} ${state.unit} in flight, arrivals are placed at once.`];
  if (throttled && throttled === flows.length) return ["busy", `${wait}: every flow with a queue has reached its own limit on the endpoints.${longest}${late}`];
  const atBound = state.stock >= state.bounds.lower;
  const because = atBound
    ? `the fleet is at its bound (${number(state.stock)} ${state.unit} in flight, dispatch goes on below ${number(state.bounds.lower)})`
    : "they are being dispatched now";
  return [state.overdue ? "warn" : "busy", `${wait}: ${because}${throttled ? `; ${plural(throttled, "flow")} at a limit of ${throttled === 1 ? "its" : "their"} own` : ""}.${longest}${late}`];
}

function tiles(state, endpoints, replicas, oldest) {
  const tile = (id, text, detail, wanted = "") => {
    setText(byId(`tile-${id}`), text);
    setText(byId(`note-${id}`), detail);
    setLevel(byId(`tile-${id}`), wanted);
  };
  tile("stock", number(state.stock), `of ${number(state.bounds.upper)} ${state.unit}`);
  tile("queued", number(state.queued, 0), plural(state.active_flows, "flow"));
  tile("oldest", seconds(oldest), state.overdue ? `${number(state.overdue, 0)} overdue` : "none overdue", state.overdue ? "warn" : "");
  tile("rate", `${number(state.drain_rate)}/s`, `${number(state.guard_dispatches_total, 0)} by the starvation guard`);
  const count = (list, test) => list.filter(test).length;
  const ready = count(endpoints, (each) => each.status === "ready");
  const out = ["drained", "draining", "down", "ejected"].map((status) => [count(endpoints, (each) => each.status === status), status]);
  const said = out.filter(([many]) => many).map(([many, status]) => `${many} ${status}`);
  const none = endpoints.length ? "" : "none discovered";
  tile("endpoints", `${ready} of ${endpoints.length}`, said.join(", ") || none || "all take requests", ready ? "" : "bad");
  const live = count(replicas, (each) => each.live);
  const degraded = count(replicas, (each) => each.live && each.degraded);
  const silent = replicas.length - live;
  const notes = [silent && `${silent} silent`, degraded && `${degraded} without Redis`].filter(Boolean);
  tile("replicas", `${live} of ${replicas.length}`, notes.join(", ") || "all well", notes.length ? "warn" : "");
}

function facts(state) {
  const shown = [
    ["Pool up for", seconds(state.pool_age_s)],
    ["Dispatched", number(state.dispatched_total, 0)],
    ["Ended", number(state.ended_total, 0)],
    ["Virtual time", state.bands.map((band) => `${band.band} ${number(band.virtual_time)}`).join(", ")],
    ["Live changes", state.tuned_version ? `version ${state.tuned_version}` : "none"],
  ];
  const list = byId("facts");
  if (!list.children.length) for (const [key] of shown) list.append(el("dt", "", key), el("dd"));
  shown.forEach(([, text], at) => setText(list.children[2 * at + 1], text));
}
