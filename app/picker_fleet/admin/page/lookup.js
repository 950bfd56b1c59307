// One request by its id: where it is, why, and how its endpoint was chosen.

import { part, read } from "./api.js";
import { byId, el, plain } from "./dom.js";
import { number, seconds } from "./format.js";

const FIELDS = [
  ["Flow", (r) => r.flow],
  ["Band", (r) => r.band],
  ["Position", (r) => typeof r.position === "number" && number(r.position, 0)],
  ["Age", (r) => typeof r.age_s === "number" && seconds(r.age_s)],
  ["Deadline in", (r) => typeof r.deadline_in_s === "number" && seconds(r.deadline_in_s)],
  ["Model", (r) => r.model],
  ["Workload", (r) => r.workload],
  ["Cost", (r) => typeof r.cost === "number" && number(r.cost)],
  ["Endpoint", (r) => r.endpoint],
  ["Fallbacks", (r) => [r.fallbacks ?? []].flat().join(", ")],
  ["Lease ends in", (r) => typeof r.lease_in_s === "number" && seconds(r.lease_in_s)],
  ["Replica", (r) => r.owner],
];

let asked = 0;

export function startLookup() {
  byId("lookup-form").addEventListener("submit", (event) => {
    event.preventDefault();
    lookUp(byId("lookup-id").value.trim());
  });
}

/** Shows a request and scrolls to it; also called for ids chosen elsewhere on the page. */
export async function lookUp(id) {
  const turn = ++asked;
  byId("lookup-id").value = id;
  byId("lookup").scrollIntoView({ block: "nearest" });
  let shown;
  try {
    shown = story(await read(`requests/${part(id)}`));
  } catch (fault) {
    shown = [el("p", "story", fault.status === 404 ? `This request is not known: it has ended, or never arrived. (${fault.message})` : fault.message)];
  }
  if (turn === asked) byId("lookup-answer").replaceChildren(...shown);
}

function story(request) {
  const parts = [el("h3", "", String(request.state ?? "known").replaceAll("-", " "))];
  if (request.why) parts.push(el("p", "story", plain(request.why)));
  const list = el("dl", "pairs");
  for (const [label, of] of FIELDS) {
    const value = of(request);
    if (value) list.append(el("dt", "", label), el("dd", "", plain(value)));
  }
  parts.push(list);
  if (request.explanation) parts.push(...choice(request.explanation));
  return parts;
}

function choice({ chosen, candidates, excluded }) {
  const parts = [el("h3", "", "How its endpoint was chosen"), el("p", "story", chosen.length ? `Chosen: ${chosen.join(", then ")}` : "No endpoint could be chosen.")];
  const out = Object.entries(excluded);
  if (candidates.length) {
    const list = el("ol");
    for (const { address, score, final, live, parts: scores } of candidates) {
      const more = Object.entries(scores).map(([key, value]) => `${key} ${number(value, 3)}`);
      if (typeof live === "number") more.push(`${number(live, 0)} in flight`);
      const total = final ?? score;
      const shown = typeof total === "number" ? `${number(total, 3)} (${more.join(", ")})` : more.join(", ") || "not compared";
      list.append(el("li", "", `${address}: ${shown}`));
    }
    parts.push(list);
  }
  for (const [address, why] of out) parts.push(el("p", "story", `Left out: ${address}, ${why}`));
  return parts;
}
