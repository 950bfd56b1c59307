// The page's only ways to put something on it. Text is always set as text: the names of flows, workloads,
// requests and models come from clients, and are shown, never interpreted.

export const byId = (id) => document.getElementById(id);

export function el(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== "") node.textContent = text;
  return node;
}

/** Sets text only where it changes, so that a quiet page costs no layout and keeps a selection. */
export function say(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Text of others, with what cannot be seen (controls, changes of direction) written out as `\u202e`. */
export function plain(text) {
  const code = (sign) => `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`;
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, code);
}

/** A name somebody else chose: plain, in isolation (its direction stays its own), whole in the tooltip. */
export function name(node, given) {
  const text = plain(given);
  let inner = node.firstElementChild;
  if (!inner || inner.tagName !== "BDI") {
    inner = el("bdi");
    node.prepend(inner);
  }
  say(inner, text);
  if (node.title !== text) node.title = text;
}

export function level(node, wanted) {
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
 * Rows that follow a list. A row lives as long as its key is in the list, so that focus, and a button under
 * a finger, survive the next second's figures. `make()` gives `{tr, update(item)}`.
 */
export class Rows {
  constructor(body, key, make) {
    this.body = body;
    this.key = key;
    this.make = make;
    this.kept = new Map();
    const table = body.closest("table");
    this.labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    // On a narrow screen a table is laid out as blocks, which must not cost it its meaning.
    table.setAttribute("role", "table");
    for (const [role, of] of Object.entries(ROLES)) {
      for (const node of table.querySelectorAll(of)) node.setAttribute("role", role);
    }
  }

  /** A new row; each of its cells knows its column's name, for screens that have no room for a head. */
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
    // Who has gone goes first: what stays is then not moved, and a button that is pressed gets its click.
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
