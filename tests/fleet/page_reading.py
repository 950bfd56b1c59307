"""Checks that the cells of the dashboard's tables are readable on a screen."""

# JavaScript: the unreadable cells of the given tables. The script scrolls to each cell, as a reader would.
UNREADABLE = """(tables) => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const shade = (colour) => {
    const [r, g, b] = channels(colour).map((each) => each / 255).map(
      (each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return channels(own)[3] === 0 ? ground(node.parentElement) : own;
  };
  const contrast = (style, node) => {
    const [dark, light] = [shade(style.color), shade(ground(node))].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const texts = (node) => [...node.childNodes].flatMap(
    (each) => each.nodeType === Node.TEXT_NODE ? (each.data.trim() ? [each] : []) : texts(each));
  const faults = [];
  let cells = 0;
  for (const id of tables) {
    const body = document.getElementById(`rows-${id}`);
    const labels = [...body.closest('table').tHead.rows[0].cells].map((th) => th.textContent);
    for (const [at, cell] of [...body.rows].flatMap((row) => [...[...row.cells].entries()])) {
      const wrong = (what) => faults.push(`${id}, ${labels[at]} (${cell.textContent}): ${what}`);
      cells += 1;
      cell.scrollIntoView({ block: 'center', behavior: 'instant' });
      const box = cell.getBoundingClientRect();
      if (!texts(cell).length) wrong('empty');
      for (const text of texts(cell)) {
        const range = document.createRange();
        range.selectNodeContents(text);
        const rects = [...range.getClientRects()];
        if (!rects.length) wrong('not drawn');
        for (const rect of rects) {
          if (rect.left < 0 || rect.right > innerWidth) wrong('beside the screen');
          if (rect.right > box.right + 1 || rect.left < box.left - 1) wrong('cut off');
          const top = document.elementFromPoint((rect.left + rect.right) / 2, (rect.top + rect.bottom) / 2);
          if (!cell.contains(top)) wrong(`under ${top?.outerHTML.slice(0, 60)}`);
        }
        if (contrast(getComputedStyle(text.parentElement), text.parentElement) < 4.5) wrong('too faint');
      }
      const above = getComputedStyle(cell, '::before');
      const named = above.content === JSON.stringify(labels[at]);
      if (!named && !cell.matches('.head, .act')) wrong(`its title is ${above.content}`);
      if (named && contrast(above, cell) < 4.5) wrong('its title is too faint');
    }
  }
  return { cells, faults, width: document.documentElement.scrollWidth };
}"""
