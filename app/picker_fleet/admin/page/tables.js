// The tables of flows, workloads, endpoints and replicas.

import { part } from "./api.js";
import { offer, pin } from "./changes.js";
import { Chart, History } from "./chart.js";
import { byId, el, setLevel, setName, plain, Rows, row, setText } from "./dom.js";
import { number, percent, plural, seconds } from "./format.js";

const FAIR_ENOUGH = 0.8; // a flow's bar changes colour if the flow gets less than this fraction of its fair share

const flows = new Rows(byId("rows-flows"), (flow) => JSON.stringify([flow.band, flow.flow]), () => {
  const { tr, cells } = row("name head", "", "n", "n", "n", "share", "n", "");
  const split = cells[5].appendChild(el("span", "split"));
  const meter = split.appendChild(el("span", "meter"));
  meter.setAttribute("aria-hidden", "true"); // the text beside the meter has the same figures
  const fill = meter.appendChild(el("i"));
  const fair = meter.appendChild(el("b"));
  const of = split.appendChild(el("span", "of"));
  const has = of.appendChild(el("b"));
  const due = of.appendChild(el("span"));
  return {
    tr,
    update(flow) {
      setName(cells[0], flow.flow || "(the whole band)");
      setText(cells[1], flow.band);
      setText(cells[2], number(flow.queued, 0));
      setText(cells[3], seconds(flow.oldest_s));
      setText(cells[4], number(flow.in_flight, 0));
      fill.style.width = `${(100 * Math.min(flow.share ?? 0, flow.scale)) / flow.scale}%`;
      fair.style.left = `${(100 * (flow.fair_share ?? 0)) / flow.scale}%`;
      meter.classList.toggle("less", flow.share !== null && flow.share < FAIR_ENOUGH * flow.fair_share);
      setText(has, percent(flow.share));
      setText(due, ` of ${percent(flow.fair_share)}`);
      setText(cells[6], number(flow.served_cost_per_s));
      setText(cells[7], flow.throttled ? "at its limit" : flow.weight === 1 ? "in turn" : `in turn, weight ${number(flow.weight)}`);
      setLevel(cells[7], flow.throttled ? "warn" : "");
    },
  };
});

const workloads = new Rows(byId("rows-workloads"), (workload) => workload.id, () => {
  const { tr, cells } = row("name head", "n", "n", "n", "n");
  return {
    tr,
    update(workload) {
      setName(cells[0], workload.id);
      setText(cells[1], `${number(workload.active, 0)} of ${number(workload.total, 0)}`);
      setText(cells[2], `${number(workload.rate, 2)}/s`);
      setText(cells[3], seconds(workload.average_wait_s));
      const { score } = workload;
      setText(cells[4], score && score.total === null ? `rate ${number(score.rate, 3)}` : number(score?.total, 3));
    },
  };
});

const STATUS_LEVELS = { ready: "good", draining: "warn", drained: "warn", down: "bad", ejected: "bad" };

const STEP_S = 4; // keep only every fifth snapshot: a fleet may have a thousand endpoints
const limits = new Map(); // address -> History of limit and requests (or tokens) in flight
let isStaged = false; // whether some endpoint does not only decode

const endpoints = new Rows(byId("rows-endpoints"), (endpoint) => endpoint.address, () => {
  const { tr, cells } = row("addr head", "", "n", "n", "long", "why long", "n", "n", "n long", "act");
  const address = cells[0].appendChild(el("span"));
  const stages = cells[0].appendChild(el("small"));
  const adapters = cells[0].appendChild(el("small"));
  const status = cells[1].appendChild(el("span", "state"));
  const chart = new Chart(cells[4].appendChild(el("span", "chart small")), null, "inFlight", ["limit"]);
  const range = cells[4].appendChild(el("small"));
  let now = null;
  const [button, pinButton] = [drain, pinOrUnpin].map((act) => {
    const made = cells[9].appendChild(el("button"));
    made.type = "button";
    made.addEventListener("click", () => act(made, now));
    return made;
  });
  return {
    tr,
    update(endpoint) {
      now = endpoint;
      setText(address, endpoint.address);
      setText(stages, isStaged ? endpoint.stages.join(", ") : "");
      const loaded = endpoint.adapters ?? [];
      setText(adapters, loaded.length ? `${loaded.length} of ${number(endpoint.max_adapters, 0)} adapters: ${plain(loaded.join(", "))}` : "");
      adapters.title = plain(loaded.join(", "));
      setText(status, endpoint.ejected ? `${endpoint.status}: ${plain(endpoint.ejected.reason)}` : endpoint.status);
      setLevel(status, STATUS_LEVELS[endpoint.status] ?? "warn");
      const metrics = endpoint.scrape_fault ?? endpoint.scrape_remark;
      const fault = endpoint.unready ?? (metrics ? `metrics: ${metrics}` : "");
      if (cells[1].title !== fault) cells[1].title = fault;
      const load = loadOf(endpoint);
      setText(cells[2], load.text);
      setText(cells[3], number(load.limit, 0));
      chart.history = limits.get(endpoint.address);
      chart.draw();
      const found = chart.history.points.map((point) => point.limit).filter((each) => each !== null);
      setText(range, found.length ? `${number(Math.min(...found), 0)} to ${number(Math.max(...found), 0)}` : "no limit");
      const { limit_reason: reason, limit_changed_s: age } = endpoint;
      setText(cells[5], reason ? plain(reason) + (typeof age === "number" ? `, ${seconds(age)} ago` : "") : "–");
      setText(cells[6], endpoint.scrape_fault ? "not known" : `${number(endpoint.running, 0)} + ${number(endpoint.waiting, 0)}`);
      setText(cells[7], percent(endpoint.kv_utilisation));
      const { latency_mean_s: mean, latency_std_s: deviation } = endpoint;
      setText(cells[8], typeof mean === "number" ? `${seconds(mean)} ± ${seconds(deviation)}` : "–");
      setText(button, endpoint.status === "drained" ? "Undrain" : "Drain");
      setText(pinButton, endpoint.pinned ? "Unpin" : "Pin");
      pinButton.hidden = !endpoint.adaptive || (typeof load.limit !== "number" && !endpoint.pinned);
      for (const each of [pinButton, button]) each.setAttribute("aria-label", `${each.textContent} ${endpoint.address}`);
    },
  };
});

/** Adds a snapshot to the endpoints' histories, also while the page is in the background. */
export function rememberEndpoints({ at, endpoints: listed }) {
  const addresses = new Set(listed.map((each) => each.address));
  for (const address of limits.keys()) if (!addresses.has(address)) limits.delete(address);
  isStaged = listed.some((each) => each.stages.join() !== "decode");
  for (const endpoint of listed) {
    const { address } = endpoint;
    const { inFlight, limit } = loadOf(endpoint);
    if (!limits.has(address)) limits.set(address, new History(STEP_S));
    limits.get(address).add({ at, inFlight: endpoint.in_flight_tokens ?? inFlight, limit });
  }
}

/** An endpoint's requests in flight, as numbers and as text; its prefills if it only prefills. */
function loadOf({ stages, in_flight: requests, limit, prefills, prefill_limit: prefillLimit }) {
  if (typeof prefills !== "number") return { inFlight: requests, limit, text: number(requests, 0) };
  const text = plural(prefills, "prefill");
  if (!stages.includes("decode")) return { inFlight: prefills, limit: prefillLimit, text };
  return { inFlight: requests, limit, text: `${number(requests, 0)} and ${text}` };
}

function pinOrUnpin(button, endpoint) {
  const { address, pinned } = endpoint;
  return offer(button, {
    title: pinned ? `Unpin ${address}?` : `Pin the limit of ${address}?`,
    text: pinned
      ? "The fleet finds the endpoint's limit again, from the limit that it found last."
      : "The endpoint keeps this limit until you unpin the endpoint. Running requests finish.",
    yes: pinned ? "Unpin" : "Pin",
    number: pinned ? undefined : loadOf(endpoint).limit,
    make: (wanted) => pin(address, pinned ? null : wanted),
    done: pinned ? `The fleet finds the limit of ${address} again.` : `The limit of ${address} is pinned.`,
  });
}

function drain(button, { address, status, in_flight: inFlight }) {
  const back = status === "drained";
  return offer(button, {
    title: back ? `Send requests to ${address} again?` : `Drain ${address}?`,
    text: back
      ? "Every replica may choose it for new requests at once."
      : `No replica will send it new requests. ${plural(inFlight, "request")} there will finish.`,
    yes: back ? "Undrain" : "Drain",
    path: `endpoints/${part(address)}/${back ? "undrain" : "drain"}`,
    done: back ? `${address} takes requests again.` : `${address} gets no new requests.`,
  });
}

const replicas = new Rows(byId("rows-replicas"), (replica) => replica.id, () => {
  const { tr, cells } = row("name head", "", "n", "n", "long", "n", "");
  const state = cells[1].appendChild(el("span", "state"));
  const link = cells[4].appendChild(el("a"));
  return {
    tr,
    update(replica) {
      setName(cells[0], replica.this ? `${replica.id} (this one)` : replica.id);
      const [how, said] = !replica.live ? ["bad", "silent"] : replica.degraded ? ["warn", "without Redis"] : ["good", "live"];
      setText(state, said);
      setLevel(state, how);
      setText(cells[2], `${seconds(replica.heartbeat_s_ago)} ago`);
      setText(cells[3], typeof replica.waiting === "number" ? plural(replica.waiting, "waiting", "waiting") : "–");
      setText(link, replica.admin ?? "–");
      const url = address(replica.admin);
      if (url) link.href = url;
      else link.removeAttribute("href");
      setText(cells[5], seconds(replica.started_s_ago));
      setText(cells[6], replica.version ?? "–");
    },
  };
});

const ownPath = /pools\/[^/]+\/$/.exec(location.pathname)?.[0] ?? ""; // empty if the page has no pool in its path

/** The URL of this pool's dashboard at a replica's admin address; "" if that is not an http address. */
function address(admin) {
  try {
    const url = new URL(/^https?:\/\//.test(admin) ? admin : `http://${admin}`);
    return /^https?:$/.test(url.protocol) ? new URL(ownPath, url).href : "";
  } catch {
    return "";
  }
}

export function showTables(shot) {
  const scale = Math.max(0.02, ...shot.flows.map((flow) => Math.max(flow.share ?? 0, flow.fair_share ?? 0)));
  flows.show(shot.flows.map((flow) => ({ ...flow, scale })));
  setText(byId("count-flows"), shot.flows.length ? `${shown(shot.flows.length, shot.flows_total, "in dispatch order")}; over 10 s, bars to ${percent(scale)}` : "");
  byId("none-flows").hidden = shot.flows.length > 0;
  workloads.show(shot.workloads);
  setText(byId("count-workloads"), shown(shot.workloads.length, shot.workloads_total));
  byId("none-workloads").hidden = shot.workloads.length > 0;
  const adaptive = shot.state.mode === "adaptive";
  endpoints.show(shot.endpoints.map((endpoint) => ({ ...endpoint, adaptive })));
  setText(byId("count-endpoints"), `${number(shot.endpoints.length, 0)}${adaptive ? "; the fleet finds their limits" : ""}`);
  byId("none-endpoints").hidden = shot.endpoints.length > 0;
  replicas.show(shot.replicas);
  setText(byId("count-replicas"), number(shot.replicas.length, 0));
}

function shown(count, total, how = "") {
  const part = total > count ? `the first ${number(count, 0)} of ${number(total, 0)}` : number(count, 0);
  return how ? `${part}, ${how}` : part;
}
