// Changes an element so that it equals new HTML, and keeps what a reader has touched: focus, selection, open details,
// scroll positions, checked boxes and typed text. Children are matched by `data-key` or `id`, else by position and tag.

const keyOf = (node) => (node.nodeType === 1 ? node.dataset.key || node.id || "" : "");

const isSame = (one, other) =>
  one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

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

/** Returns how many keyed children were added. */
const patchChildren = (target, source) => {
  const keyed = new Map();
  for (const child of target.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
  let added = 0;
  let next = target.firstChild;
  for (const wanted of [...source.childNodes]) {
    const key = keyOf(wanted);
    const known = key ? keyed.get(key) : null;
    if (known && isSame(known, wanted)) {
      if (known === next) next = next.nextSibling;
      else target.insertBefore(known, next);
      added += patchNode(known, wanted);
    } else if (!key && next && isSame(next, wanted)) {
      const here = next;
      next = next.nextSibling;
      added += patchNode(here, wanted);
    } else {
      const fresh = document.importNode(wanted, true);
      target.insertBefore(fresh, next);
      if (key && fresh.nodeType === 1) {
        fresh.classList.add("fresh");
        added += 1;
      }
    }
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
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
  return parsed ? patchNode(target, parsed) : 0;
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
