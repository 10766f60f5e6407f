// Makes a page live and adds keys. Every page works without this.
import { patch, patchRows } from "./patch.js";
import { growRows } from "./rows.js";

const POLL_MS = 10000;
const HIDDEN_MS = 5000;
const RETRY_MS = 2000;
const READING_PX = 200;

const state = document.getElementById("live-state");
const say = (text) => {
  if (state && state.textContent !== text) state.textContent = text;
};

const stored = (name) => {
  try { return localStorage.getItem(name) || ""; } catch { return ""; }
};
const store = (name, value) => {
  try { localStorage.setItem(name, value); } catch { /* a private window */ }
};

// Live parts.

const parts = () => [...document.querySelectorAll("[data-live]")];
let source = null;
let paused = false;
let timer = 0;
let failures = 0;

const isSelecting = () => {
  const selection = getSelection();
  return selection && !selection.isCollapsed;
};

// New rows of a list wait while the reader is further down, or has fetched further rows.
const waiting = new Map();
const isHeld = (part) => part.querySelector("tr[data-key]") && ("extended" in part.dataset || scrollY > READING_PX);

const showWaiting = () => {
  const isExtended = parts().some((part) => "extended" in part.dataset);
  scrollTo(0, 0);
  if (isExtended) return location.reload();
  const held = [...waiting].map(([name, { html }]) => ({ name, html }));
  waiting.clear();
  apply(held);
};

const sayNew = (count) => {
  if (state.querySelector("button")?.dataset.count === String(count)) return;
  const button = Object.assign(document.createElement("button"), { type: "button", className: "button", textContent: `${count} new` });
  button.dataset.count = count;
  button.addEventListener("click", showWaiting);
  state.replaceChildren(button);
};

const apply = (changes) => {
  // Text that is being selected would be lost.
  if (paused || isSelecting()) return;
  let added = 0;
  for (const { name, html } of changes) {
    const target = parts().find((part) => part.dataset.live === name);
    if (!target) continue;
    waiting.delete(name);
    if (isHeld(target)) {
      const count = patchRows(target, html);
      if (count > 0) waiting.set(name, { html, count });
    } else added += patch(target, html);
  }
  const held = [...waiting.values()].reduce((sum, { count }) => sum + count, 0);
  if (held > 0) sayNew(held);
  else say(added > 0 ? `Live · ${added} new` : "Live");
};

const poll = async () => {
  try {
    const response = await fetch(location.href, { headers: { accept: "text/html" } });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    apply([...page.querySelectorAll("[data-live]")].map((part) => ({ name: part.dataset.live, html: part.outerHTML })));
    say("Updated every 10 s");
  } catch {
    say("No connection, trying again");
  }
  timer = setTimeout(connect, POLL_MS);
};

const disconnect = () => {
  clearTimeout(timer);
  if (source) source.close();
  source = null;
};

const connect = () => {
  disconnect();
  if (paused || document.hidden || parts().length === 0) return;
  source = new EventSource(`/console/live?of=${encodeURIComponent(location.pathname + location.search)}`);
  source.addEventListener("parts", (event) => {
    failures = 0;
    apply(JSON.parse(event.data));
  });
  source.addEventListener("error", () => {
    disconnect();
    failures += 1;
    say("No connection, trying again");
    // A refused connection is replaced by polling.
    timer = failures > 2 ? setTimeout(poll, RETRY_MS) : setTimeout(connect, RETRY_MS);
  });
};

// A hidden tab gives its connection to others: browsers allow six to one server.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) connect();
  else timer = setTimeout(() => document.hidden && disconnect(), HIDDEN_MS);
});
addEventListener("pagehide", disconnect);
addEventListener("pageshow", (event) => event.persisted && connect());
addEventListener("scroll", () => { if (waiting.size > 0 && scrollY === 0 && !document.querySelector("[data-extended]")) showWaiting(); }, { passive: true });
if (state) connect();
growRows();

// Keys.

const rows = () => [...document.querySelectorAll("main tbody tr")].filter((row) => row.querySelector("a"));
const move = (step) => {
  const all = rows();
  const at = all.findIndex((row) => row.hasAttribute("data-active"));
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  if (!next) return;
  if (at >= 0) all[at].removeAttribute("data-active");
  next.setAttribute("data-active", "");
  next.querySelector("a").focus();
};
const pause = () => {
  paused = !paused;
  if (paused) { disconnect(); say("Paused"); } else connect();
};
const copy = async () => {
  const command = document.getElementById("command");
  if (!command || !navigator.clipboard) return;
  await navigator.clipboard.writeText(command.textContent);
  say("Command copied");
};

let isGoing = false;
document.addEventListener("keydown", (event) => {
  const field = event.target.closest?.("input, textarea, select");
  if (event.key === "Escape" && field) field.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey || stored("no-keys")) return;
  if (isGoing) {
    isGoing = false;
    const link = [...document.querySelectorAll(".areas a[data-key]")].find((it) => it.dataset.key === event.key);
    if (link) link.click();
    return;
  }
  const active = document.querySelector("tr[data-active]");
  const actions = {
    "/": () => document.getElementById("search")?.focus(),
    g: () => { isGoing = true; setTimeout(() => { isGoing = false; }, 1500); },
    j: () => move(1),
    k: () => move(-1),
    x: () => active?.querySelector("input[type=checkbox]")?.click(),
    p: pause,
    y: copy,
    "?": () => { location.href = "/console/help"; },
  };
  if (Object.hasOwn(actions, event.key)) {
    event.preventDefault();
    actions[event.key]();
  }
});

// Preferences of this browser.

const theme = stored("theme");
if (theme) document.documentElement.dataset.theme = theme;
const choice = document.getElementById("theme");
if (choice) {
  choice.value = theme;
  choice.addEventListener("change", () => {
    store("theme", choice.value);
    if (choice.value) document.documentElement.dataset.theme = choice.value;
    else delete document.documentElement.dataset.theme;
  });
}
const noKeys = document.getElementById("no-keys");
if (noKeys) {
  noKeys.checked = stored("no-keys") !== "";
  noKeys.addEventListener("change", () => store("no-keys", noKeys.checked ? "yes" : ""));
}

// A box in the head of a table selects all rows that are shown.
for (const box of document.querySelectorAll("thead input[type=checkbox]")) box.hidden = false;
document.addEventListener("change", (event) => {
  if (!event.target.matches("thead input[type=checkbox]")) return;
  for (const box of event.target.closest("table").querySelectorAll("tbody input[type=checkbox]")) box.checked = event.target.checked;
});

// A form that was sent cannot be sent again by a second click.
document.addEventListener("submit", (event) => {
  for (const button of event.target.querySelectorAll("button")) setTimeout(() => { button.disabled = true; }, 0);
});
