// The dashboard of one replica's admin API: starts its parts and passes snapshots to them.

import { read } from "./api.js";
import { offer } from "./changes.js";
import { startDecisions, takeDecisions } from "./decisions.js";
import { byId, el, setText } from "./dom.js";
import { plural } from "./format.js";
import { Live } from "./live.js";
import { lookUp, startLookup } from "./lookup.js";
import { remember, showOverview, showTrouble } from "./overview.js";
import { startQueue } from "./queue.js";
import { rememberEndpoints, showTables } from "./tables.js";
import { showTenants } from "./tenants.js";
import { startTheme } from "./theme.js";

let latest = null;
let scheduled = false;

startTheme();
startLookup();
startQueue(lookUp);
startDecisions();

/** Offers the replica's pools in a list, if there are several. Each pool has its own dashboard address. */
async function showPools() {
  const { pools } = await read("pools");
  if (pools.length < 2) return;
  const own = /pools\/([^/]+)\/$/.exec(location.pathname);
  const shown = own ? decodeURIComponent(own[1]) : pools[0].name;
  const list = byId("pools");
  list.replaceChildren(...pools.map(({ name }) => el("option", "", name)));
  list.value = shown;
  list.hidden = false;
  byId("pool").hidden = true;
  list.addEventListener("change", () => {
    const root = location.pathname.replace(/(pools\/[^/]+\/)?$/, "");
    location.assign(`${root}pools/${encodeURIComponent(list.value)}/`);
  });
}
showPools().catch(() => {}); // without the list the page still shows its own pool

/** Draws at most once a frame, and not while the page is hidden. */
function draw() {
  if (scheduled || !latest) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    const { at, state } = latest;
    byId("main").dataset.at = at; // the snapshot that is shown
    setText(byId("pool"), state.pool);
    setText(byId("replica"), state.replica);
    document.title = `${state.queued} waiting · ${state.pool} · Picker Fleet`;
    const pause = byId("pause");
    if (pause.dataset.paused === undefined) pause.disabled = false;
    pause.dataset.paused = String(state.paused);
    setText(pause, state.paused ? "Resume dispatch" : "Pause dispatch");
    pause.classList.toggle("strong", state.paused);
    showOverview(latest);
    showTables(latest);
    showTenants(latest);
  });
}

byId("pause").addEventListener("click", () => {
  const { paused, queued } = latest.state;
  offer(byId("pause"), {
    title: paused ? "Resume dispatch?" : "Pause dispatch for the whole fleet?",
    text: paused
      ? `${plural(queued, "request")} will be served again, within the bounds.`
      : "Every replica stops sending requests to endpoints: arrivals wait, until their deadline, or are refused. Running requests finish.",
    yes: paused ? "Resume" : "Pause",
    path: paused ? "resume" : "pause",
    done: paused ? "The fleet dispatches again." : "The fleet has stopped dispatching.",
  });
});

new Live({
  snapshot(shot) {
    latest = shot;
    remember(shot);
    rememberEndpoints(shot);
    draw();
  },
  decisions: takeDecisions,
  unavailable: ({ detail }) => showTrouble(detail),
  link(state, since) {
    const pill = byId("connection");
    if (pill.dataset.state !== state) pill.dataset.state = state;
    setText(pill, state === "live" ? "live" : state === "stale" ? `stale since ${since.toLocaleTimeString("en-GB")}` : "connecting");
  },
});
