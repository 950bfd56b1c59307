// Helpers that change the page. The helpers set text only as text, never as HTML: names of flows, workloads, requests
// and models come from clients.

export const byId = (id) => document.getElementById(id);

export function el(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== "") node.textContent = text;
  return node;
}

/** Sets text only if it changes, so that an unchanged page needs no layout and keeps its selection. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Text from clients, with invisible characters (controls, changes of direction) escaped, as `\u202e`. */
export function plain(text) {
  const code = (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`;
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, code);
}

/** Shows a name that a client chose: escaped, isolated from the direction of other text, whole in the tooltip. */
export function setName(node, given) {
  const text = plain(given);
  let inner = node.firstElementChild;
  if (!inner || inner.tagName !== "BDI") {
    inner = el("bdi");
    node.prepend(inner);
  }
  setText(inner, text);
  if (node.title !== text) node.title = text;
}

export function setLevel(node, wanted) {
  if (node.dataset.level !== wanted) node.dataset.level = wanted;
}

/** A row of `<td>`s with these classes; `cells` are in order. */
export function row(...classes) {
  const tr = el("tr");
  const cells = classes.map((each) => tr.appendChild(el("td", each)));
  return { tr, cells };
}

const ROLES = { rowgroup: "thead, tbody", row: "tr", columnheader: "th" };

/**
 * Table rows that follow a list. A row stays while its key is in the list, so that an update does not take the
 * focus or replace a button that is being pressed. `make()` returns `{tr, update(item)}`.
 */
export class Rows {
  constructor(body, key, make) {
    this.body = body;
    this.key = key;
    this.make = make;
    this.kept = new Map();
    const table = body.closest("table");
    this.labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    // On a narrow screen a table is laid out as blocks and would lose its role.
    table.setAttribute("role", "table");
    for (const [role, of] of Object.entries(ROLES)) {
      for (const node of table.querySelectorAll(of)) node.setAttribute("role", role);
    }
  }

  /** A new row; each cell has its column's name, for screens without room for a header. */
  made() {
    const made = this.make();
    made.tr.setAttribute("role", "row");
    [...made.tr.cells].forEach((cell, at) => {
      cell.setAttribute("role", "cell");
      cell.dataset.label = this.labels[at];
    });
    return made;
  }

  show(items) {
    const focused = document.activeElement;
    const wanted = new Map();
    for (const item of items) {
      let key = this.key(item);
      while (wanted.has(key)) key += " again";
      wanted.set(key, item);
    }
    // Remove old rows first: then the other rows do not move, and a pressed button gets its click.
    for (const [key, { tr }] of this.kept) if (!wanted.has(key)) tr.remove();
    const next = new Map();
    for (const [key, item] of wanted) {
      const made = this.kept.get(key) ?? this.made();
      made.update(item);
      const place = this.body.children[next.size] ?? null;
      if (place !== made.tr) this.body.insertBefore(made.tr, place);
      next.set(key, made);
    }
    this.kept = next;
    // Moving a row takes the focus from it.
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus({ preventScroll: true });
  }
}
