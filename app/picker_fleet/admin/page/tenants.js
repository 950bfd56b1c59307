// The tree of tenants: a row for each node, whose children are read when the row is opened.

import { part, read } from "./api.js";
import { byId, el, setLevel, setName, Rows, row, setText } from "./dom.js";
import { number, percent, seconds } from "./format.js";

const EVERY_MS = 2000;
const MOST_OPEN = 20; // each open node is one call
const open = new Set(); // paths whose children are shown
const DOTS = /(^|\/)\.\.?(\/|$)/; // a browser removes such segments from the URL, and so reads another node
let readAt = -Infinity;
let isReading = false;

const UNITS = { parallel: "in flight", budget: "cost units" };

function limitText({ unit, per, amount, burst, remaining }) {
  const name = UNITS[unit] ?? unit.replaceAll("_", " ");
  const of = unit === "parallel" ? burst - remaining : remaining;
  const rate = amount === burst ? "" : `${number(amount, 0)} `;
  return `${number(of, 0)} of ${number(burst, 0)} ${name}${unit === "parallel" ? "" : " left"}${per ? `, ${rate}per ${per}` : ""}`;
}

const tenants = new Rows(byId("rows-tenants"), ({ tenant }) => tenant.path, () => {
  const { tr, cells } = row("name head", "n", "n", "n", "n", "why long", "");
  const button = cells[0].appendChild(el("button", "quiet twist"));
  button.type = "button";
  const name = cells[0].appendChild(el("span"));
  let path = "";
  button.addEventListener("click", () => {
    if (!open.delete(path) && open.size < MOST_OPEN) open.add(path);
    refresh();
  });
  return {
    tr,
    update({ tenant, depth, shown }) {
      path = tenant.path;
      cells[0].style.paddingLeft = `${depth}rem`;
      setText(button, open.has(path) ? "−" : "+");
      button.setAttribute("aria-expanded", String(open.has(path)));
      button.setAttribute("aria-label", `children of ${path}`);
      button.hidden = path.endsWith("*") || DOTS.test(path);
      setName(name, shown ? `${path} (${shown})` : path);
      setText(cells[1], number(tenant.weight));
      setText(cells[2], number(tenant.queued, 0));
      setText(cells[3], `${percent(tenant.share)} of ${percent(tenant.fair_share)}`);
      setText(cells[4], number(tenant.served_cost_per_s));
      setText(cells[5], tenant.limits.map(limitText).join("; ") || "–");
      const until = tenant.waits_s === null ? "an end" : seconds(tenant.waits_s);
      setText(cells[6], tenant.waits ? `waits for its balance: ${until}` : tenant.limits.length ? `beyond: ${tenant.over_limit}` : "no limit");
      setLevel(cells[6], tenant.waits ? "warn" : "");
    },
  };
});

/**
 * The rows below a node, depth first. If these rows lack some of its children, the node's own row `above` says so.
 * A node that is gone is closed.
 */
async function rowsBelow(path, depth, above = {}) {
  let page;
  try {
    page = await read(path ? `tenants/${path.split("/").map(part).join("/")}` : "tenants");
  } catch (fault) {
    if (fault.status !== 404) throw fault;
    open.delete(path);
    return [];
  }
  if (!path) setText(byId("count-tenants"), `${number(page.children.length, 0)} of ${number(page.total, 0)} at the top`);
  if (page.cursor) above.shown = `${number(page.children.length, 0)} of ${number(page.total, 0)} shown`;
  const rows = [];
  for (const tenant of page.children) {
    const own = { tenant, depth };
    rows.push(own);
    if (open.has(tenant.path)) rows.push(...(await rowsBelow(tenant.path, depth + 1, own)));
  }
  return rows;
}

async function refresh() {
  if (isReading) return;
  isReading = true;
  readAt = performance.now();
  try {
    const rows = await rowsBelow("", 0);
    tenants.show(rows);
    byId("none-tenants").hidden = rows.length > 0;
  } catch {
    // The connection's state already says that the figures are stale.
  } finally {
    isReading = false;
  }
}

/** Shows the tree if the configuration has tenants, read at most every two seconds. */
export function showTenants({ state }) {
  byId("tenants").hidden = byId("nav-tenants").hidden = !state.tenants;
  if (state.tenants && performance.now() - readAt >= EVERY_MS) refresh();
}
