// Changes an element so that it equals new HTML, and keeps what a reader has touched: focus, selection, open details,
// scroll positions, checked boxes and typed text. Children are matched by `data-key` or `id`, else by tag, first class and the
// action of a form, in order: what has a match stays the same element.

/** Children on both sides that are compared with each other at most; beyond it, only equal ends and keys match. */
const COMPARED_MAX = 40000;

const keyOf = (node) => (node.nodeType === 1 ? node.dataset.key || node.id || "" : "");

const signOf = (node) => {
  if (node.nodeType !== 1) return node.nodeName;
  const key = keyOf(node);
  return key ? `${node.nodeName}#${key}` : `${node.nodeName}.${node.classList[0] || ""}.${node.getAttribute("action") || ""}`;
};

/** Attributes that belong to the reader, not to the server. */
const isKept = (element, name) =>
  (element.nodeName === "DETAILS" && name === "open") || name === "data-active" || name === "class" && element.classList.contains("fresh");

const patchAttributes = (target, source) => {
  for (const { name } of [...target.attributes]) {
    if (!source.hasAttribute(name) && !isKept(target, name)) target.removeAttribute(name);
  }
  for (const { name, value } of source.attributes) {
    if (target.getAttribute(name) !== value && !isKept(target, name)) target.setAttribute(name, value);
  }
};

/** Which of `old` each of `wanted` is, so that as many as possible stay in their order: a longest common subsequence. */
const matches = (old, wanted) => {
  const [a, b] = [old.map(signOf), wanted.map(signOf)];
  const found = new Map();
  let start = 0;
  let [aEnd, bEnd] = [a.length, b.length];
  while (start < aEnd && start < bEnd && a[start] === b[start]) { found.set(wanted[start], old[start]); start += 1; }
  while (aEnd > start && bEnd > start && a[aEnd - 1] === b[bEnd - 1]) { aEnd -= 1; bEnd -= 1; found.set(wanted[bEnd], old[aEnd]); }
  const [rows, columns] = [aEnd - start, bEnd - start];
  if (rows === 0 || columns === 0 || rows * columns > COMPARED_MAX) return found;
  // lengths[i][j]: of the longest common subsequence of what follows i and j.
  const lengths = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      lengths[i][j] = a[start + i] === b[start + j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) { found.set(wanted[start + j], old[start + i]); i += 1; j += 1; }
    else if (lengths[i + 1][j] >= lengths[i][j + 1]) i += 1;
    else j += 1;
  }
  return found;
};

/** Returns how many keyed children were added. */
const patchChildren = (target, source) => {
  const [old, wanted] = [[...target.childNodes], [...source.childNodes]];
  const found = matches(old, wanted);
  const staying = new Set(found.values());
  // What has a key and has moved.
  const moved = new Map();
  for (const child of old) if (!staying.has(child) && keyOf(child)) moved.set(signOf(child), child);
  for (const child of old) if (!staying.has(child)) child.remove();
  let added = 0;
  let next = target.firstChild;
  for (const child of wanted) {
    const here = found.get(child) || (keyOf(child) && moved.get(signOf(child)));
    if (here) {
      if (here === next) next = next.nextSibling;
      else target.insertBefore(here, next);
      moved.delete(signOf(child));
      added += patchNode(here, child);
      continue;
    }
    const fresh = document.importNode(child, true);
    target.insertBefore(fresh, next);
    if (keyOf(fresh)) {
      fresh.classList.add("fresh");
      added += 1;
    }
  }
  return added;
};

const patchNode = (target, source) => {
  if (target.nodeType !== 1) {
    if (target.nodeValue !== source.nodeValue) target.nodeValue = source.nodeValue;
    return 0;
  }
  patchAttributes(target, source);
  // A field keeps what was typed into it.
  if (["INPUT", "TEXTAREA", "SELECT"].includes(target.nodeName)) return 0;
  return patchChildren(target, source);
};

const parse = (html) => new DOMParser().parseFromString(html, "text/html").body.firstElementChild;

/** Makes `target` equal to the first element of `html`. Returns how many keyed children are new. */
export const patch = (target, html) => {
  const parsed = parse(html);
  if (!parsed) return 0;
  const focused = target.contains(document.activeElement) ? document.activeElement : null;
  const added = patchNode(target, parsed);
  // It has moved. If it is gone, the browser goes on from its place with the next Tab.
  if (focused?.isConnected && focused !== document.activeElement) focused.focus({ preventScroll: true });
  return added;
};

/** Changes only the rows that `target` already has, so that nothing moves. Returns how many others `html` has. */
export const patchRows = (target, html) => {
  const rows = new Map([...target.querySelectorAll("tr[data-key]")].map((row) => [row.dataset.key, row]));
  let others = 0;
  for (const wanted of parse(html)?.querySelectorAll("tr[data-key]") ?? []) {
    const row = rows.get(wanted.dataset.key);
    if (row) patchNode(row, wanted);
    else others += 1;
  }
  return others;
};
