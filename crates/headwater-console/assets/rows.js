// Fetches further rows of a list when its end comes into view, and keeps at most MAX_ROWS of them in the page. The links
// between pages work without this.

const MAX_ROWS = 400;
const MARGIN_PX = 800;

const tableBefore = (pager) => {
  for (let node = pager.previousElementSibling; node; node = node.previousElementSibling) {
    const table = node.matches("table") ? node : node.querySelector("table");
    if (table) return table;
  }
  return null;
};

const nextOf = (pager) => pager?.querySelector("a[rel=next]")?.getAttribute("href") || "";

/** Changes the page so that a row stays where the reader sees it. */
const keepingPlace = (row, change) => {
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
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const pager = page.querySelector("nav.pager[aria-label=Pages]");
      const table = pager && tableBefore(pager);
      if (!table) throw new Error("no rows");
      this.add(number, [...table.tBodies[0].rows], nextOf(pager));
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

  add(number, rows, next) {
    const isLater = number === this.end;
    const here = [...this.body.rows].filter((row) => row !== this.earlier);
    const known = new Set(here.map((row) => row.dataset.key));
    const fresh = rows.filter((row) => !known.has(row.dataset.key)).map((row) => document.importNode(row, true));
    for (const row of fresh) {
      this.pageOf.set(row, number);
      this.restore(row);
    }
    const anchor = isLater ? here.at(-1) : here[0];
    keepingPlace(anchor, () => {
      if (isLater) this.body.append(...fresh);
      else this.earlier.after(...fresh);
      this.trim(isLater);
    });
    if (isLater) this.pages[++this.end] = next;
    else this.first = number;
    this.mark();
  }

  /** Removes whole pages at the other end. */
  trim(fromStart) {
    const rows = () => [...this.body.rows].filter((row) => row !== this.earlier);
    while (rows().length > MAX_ROWS) {
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
    if (box?.form) box.form.append(Object.assign(document.createElement("input"), { type: "hidden", name: box.name, value: box.value }));
  }

  restore(row) {
    const box = row.querySelector("input[type=checkbox]");
    const form = this.body.closest("form");
    const kept = box && form && [...form.querySelectorAll("input[type=hidden]")].find((it) => it.name === box.name && it.value === box.value);
    if (kept) { kept.remove(); box.checked = true; }
  }

  /** Says that this list is longer than its first page, and shows where the rows before it are. */
  mark() {
    if (this.part) this.part.dataset.extended = "";
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
  const pager = document.querySelector("nav.pager[aria-label=Pages]");
  const table = pager && nextOf(pager) && tableBefore(pager);
  if (table?.tBodies[0]) new RowList(pager, table);
};
