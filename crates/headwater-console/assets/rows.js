// Fetches further rows of a list when its end comes into view, and keeps at most MAX_ROWS of them in the page. The links
// between pages work without this.

const MAX_ROWS = 400;
const MARGIN_PX = 800;
const ROWS_AT_ONCE = 10;
const PAGER = "nav.pager[aria-label=Pages]";

const tableBefore = (pager) => {
  for (let node = pager.previousElementSibling; node; node = node.previousElementSibling) {
    const table = node.matches("table") ? node : node.querySelector("table");
    if (table) return table;
  }
  return null;
};

const nextOf = (pager) => pager?.querySelector("a[rel=next]")?.getAttribute("href") || "";

/** Ends the current task, so that input comes in between. */
const nextTask = () => new Promise((done) => { setTimeout(done); });

/** Waits until the browser has painted: what is added between two frames is laid out in one task. */
const nextFrame = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });

/** The rows of a page and the address of the next one. Parses only the content of the page. */
const rowsOf = (text) => {
  const template = document.createElement("template");
  template.innerHTML = text.slice(text.indexOf("<main"), text.lastIndexOf("</main>"));
  const pager = template.content.querySelector(PAGER);
  const table = pager && tableBefore(pager);
  if (!table) throw new Error("no rows");
  return { rows: [...table.tBodies[0].rows], next: nextOf(pager) };
};

/** Keeps the widths of columns: further or longer rows move nothing sideways, and the rows that are there need no new layout. */
export const keepWidths = (table) => {
  if (table.classList.contains("long")) return;
  const cells = [...(table.tHead?.rows[0]?.cells ?? [])];
  const widths = cells.map((cell) => cell.getBoundingClientRect().width);
  const total = widths.reduce((sum, width) => sum + width, 0);
  if (total > table.parentElement.clientWidth) table.style.minWidth = `${total}px`;
  table.classList.add("long");
  cells.forEach((cell, index) => { cell.style.width = `${(100 * widths[index]) / total}%`; });
};

/** Changes the page so that a row stays where the reader sees it. */
export const keepingPlace = (row, change) => {
  const before = row?.getBoundingClientRect().top;
  change();
  if (row?.isConnected) scrollBy(0, row.getBoundingClientRect().top - before);
};

class RowList {
  constructor(pager, table) {
    this.pager = pager;
    this.body = table.tBodies[0];
    this.part = pager.closest("[data-live]");
    // Addresses of all pages so far; those from `first` to before `end` are in the document.
    this.pages = [location.pathname + location.search, nextOf(pager)];
    this.first = 0;
    this.end = 1;
    this.pageOf = new WeakMap();
    for (const row of this.body.rows) this.pageOf.set(row, 0);
    this.isLoading = false;
    /** Fields of selected rows that have left the page, by the value of their box. */
    this.selected = new Map();
    this.earlier = document.createElement("tr");
    this.earlier.className = "earlier";
    const cell = this.earlier.insertCell();
    cell.colSpan = table.tHead?.rows[0]?.cells.length || 1;
    cell.append(Object.assign(document.createElement("a"), { textContent: "Earlier rows" }));
    this.observer = new IntersectionObserver((seen) => this.see(seen), { rootMargin: `${MARGIN_PX}px` });
    this.observer.observe(pager);
  }

  see(seen) {
    if (this.isLoading) return;
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      if (target === this.pager && this.pages[this.end]) return this.load(this.end);
      if (target === this.earlier && this.first > 0) return this.load(this.first - 1);
    }
  }

  async load(number) {
    this.isLoading = true;
    // The first page may have changed since: what follows it follows its last row of now.
    if (number === 1 && this.end === 1) this.pages[1] = nextOf(this.pager) || this.pages[1];
    try {
      const response = await fetch(this.pages[number], { headers: { accept: "text/html" } });
      if (!response.ok) throw new Error(response.statusText);
      const text = await response.text();
      await nextTask();
      const { rows, next } = rowsOf(text);
      await nextTask();
      await this.add(number, rows, next);
    } catch {
      // The links between pages are still there.
      this.observer.disconnect();
      return;
    } finally {
      this.isLoading = false;
    }
    // Observing anew reports at once whether the end is still in view.
    for (const mark of [this.pager, this.earlier]) {
      this.observer.unobserve(mark);
      if (mark.isConnected) this.observer.observe(mark);
    }
  }

  /** Adds the rows of a page, some at a time: the layout of many is a task that is felt. */
  async add(number, rows, next) {
    const isLater = number === this.end;
    const here = [...this.body.rows].filter((row) => row !== this.earlier);
    const known = new Set(here.map((row) => row.dataset.key));
    const fresh = rows.filter((row) => !known.has(row.dataset.key)).map((row) => document.importNode(row, true));
    for (const row of fresh) this.pageOf.set(row, number);
    // From here on, live changes move no rows.
    if (this.part) this.part.dataset.extended = "";
    keepWidths(this.body.parentElement);
    const anchor = isLater ? here.at(-1) : here[0];
    await nextFrame();
    keepingPlace(anchor, () => this.trim(isLater, MAX_ROWS - fresh.length));
    while (fresh.length > 0) {
      await nextFrame();
      const some = isLater ? fresh.splice(0, ROWS_AT_ONCE) : fresh.splice(-ROWS_AT_ONCE);
      // In the task that inserts them: a form that is sent in between has each selected row.
      for (const row of some) this.restore(row);
      // Rows at the end move nothing, so their place needs no layout.
      if (isLater) this.body.append(...some);
      else keepingPlace(anchor, () => this.before(...some));
    }
    if (isLater) this.pages[++this.end] = next;
    else this.first = number;
    this.mark();
  }

  before(...rows) {
    if (this.earlier.isConnected) this.earlier.after(...rows);
    else this.body.prepend(...rows);
  }

  /** Removes whole pages at the other end until there are at most so many rows. */
  trim(fromStart, max) {
    const rows = () => [...this.body.rows].filter((row) => row !== this.earlier);
    while (rows().length > max) {
      const page = fromStart ? this.first++ : --this.end;
      if (this.first >= this.end) return;
      for (const row of rows().filter((row) => this.pageOf.get(row) === page)) {
        this.remember(row);
        row.remove();
      }
    }
  }

  /** A selected row that leaves the page stays selected: its id stays in the form. */
  remember(row) {
    const box = row.querySelector("input[type=checkbox]:checked");
    if (!box?.form) return;
    const kept = Object.assign(document.createElement("input"), { type: "hidden", name: box.name, value: box.value });
    box.form.append(kept);
    this.selected.set(box.value, kept);
  }

  restore(row) {
    const box = row.querySelector("input[type=checkbox]");
    const kept = box && this.selected.get(box.value);
    if (!kept) return;
    kept.remove();
    this.selected.delete(box.value);
    box.checked = true;
  }

  /** Shows where the rows before and after these are. */
  mark() {
    if (this.first > 0) {
      this.earlier.cells[0].firstChild.setAttribute("href", this.pages[this.first - 1]);
      if (!this.earlier.isConnected) this.body.prepend(this.earlier);
    } else this.earlier.remove();
    const link = this.pager.querySelector("a[rel=next]");
    if (link) link.hidden = !this.pages[this.end];
    if (link && this.pages[this.end]) link.setAttribute("href", this.pages[this.end]);
  }
}

/** Makes the list of a page grow while the reader scrolls. */
export const growRows = () => {
  const pager = document.querySelector(PAGER);
  const table = nextOf(pager) ? tableBefore(pager) : null;
  if (table?.tBodies[0]) new RowList(pager, table);
};
