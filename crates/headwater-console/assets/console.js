// Makes a page live and adds keys. Every page works without this.
import { patch, patchRows } from "./patch.js";
import { growRows, keepWidths, keepingPlace } from "./rows.js";

const POLL_MS = 10000;
const HIDDEN_MS = 5000;
const RETRY_MS = 2000;
const READING_PX = 200;

const state = document.getElementById("live-state");
const offer = document.getElementById("new-rows");
const pauseButton = document.getElementById("pause");
/** Buttons of forms that were sent. */
const sent = new Set();
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
let isLoggedOut = false;
/** How the page is kept up to date. */
let mode = "Live";

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
  apply(held, true);
};

/** Offers the new rows that wait. The button stays the same element, because it may have the focus. */
const offerNew = (count) => {
  const button = offer.querySelector("button");
  if (count === 0) {
    if (button && button === document.activeElement) document.getElementById("main").focus({ preventScroll: true });
    return button?.remove();
  }
  const text = `${count} new`;
  if (!button) {
    const fresh = Object.assign(document.createElement("button"), { type: "button", className: "button primary", textContent: text });
    fresh.addEventListener("click", showWaiting);
    offer.append(fresh);
  } else if (button.textContent !== text) button.textContent = text;
};

/** The row or item at the top of the window. What is above it may become higher or lower. */
const firstInView = () => {
  if (scrollY === 0) return null;
  const first = [...document.querySelectorAll("main [data-live] [data-key]")].find((item) => item.getBoundingClientRect().bottom > 0);
  return first?.getBoundingClientRect().top < innerHeight / 2 ? first : null;
};

// Changes wait while text is being selected, which would be lost.
const postponed = new Map();

/** `isWanted`: the reader has asked for these changes, so they do not wait. */
const apply = (changes, isWanted = false) => {
  for (const change of changes) postponed.set(change.name, change);
  if (!isWanted && (paused || isSelecting())) return;
  const all = [...postponed.values()];
  postponed.clear();
  let added = 0;
  keepingPlace(firstInView(), () => {
    for (const { name, html } of all) {
      const target = parts().find((part) => part.dataset.live === name);
      if (!target) continue;
      waiting.delete(name);
      if (isHeld(target)) {
        target.querySelectorAll("table").forEach(keepWidths);
        const count = patchRows(target, html);
        if (count > 0) waiting.set(name, { html, count });
      } else added += patch(target, html);
    }
  });
  offerNew([...waiting.values()].reduce((sum, { count }) => sum + count, 0));
  if (!paused) say(added > 0 ? `${mode} · ${added} new` : mode);
};

const poll = async () => {
  try {
    const response = await fetch(location.href, { headers: { accept: "text/html" } });
    // The login has ended. To try again would be in vain, and what is typed here stays.
    if (response.redirected && new URL(response.url).pathname === "/console/login") {
      isLoggedOut = true;
      return say("Logged out: reload to log in");
    }
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const current = [...page.querySelectorAll("[data-live]")];
    // An error, the login or another page: what is shown is not known to be current.
    if (!response.ok || response.redirected || current.length === 0) throw new Error("not this page");
    mode = "Updated every 10 s";
    apply(current.map((part) => ({ name: part.dataset.live, html: part.outerHTML })));
  } catch {
    if (!paused) say("No connection, trying again");
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
  if (paused || isLoggedOut || document.hidden || parts().length === 0) return;
  source = new EventSource(`/console/live?of=${encodeURIComponent(location.pathname + location.search)}`);
  source.addEventListener("parts", (event) => {
    const changes = JSON.parse(event.data);
    // The page has no live parts any more, as when it cannot be shown: the server ends the connection, and polling goes on.
    if (changes.length === 0) return;
    failures = 0;
    mode = "Live";
    apply(changes);
  });
  // The server ends each connection after some time; the next one begins with everything.
  source.addEventListener("end", connect);
  source.addEventListener("error", () => {
    disconnect();
    failures += 1;
    // A refused connection is replaced by polling.
    if (failures > 2) return poll();
    say("No connection, trying again");
    timer = setTimeout(connect, RETRY_MS);
  });
};

// A hidden tab gives its connection to others: browsers allow six to one server.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) connect();
  else timer = setTimeout(() => document.hidden && disconnect(), HIDDEN_MS);
});
document.addEventListener("selectionchange", () => { if (postponed.size > 0) apply([]); });
addEventListener("pagehide", disconnect);
addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  connect();
  for (const button of sent) button.disabled = false;
  sent.clear();
});
addEventListener("scroll", () => {
  if (waiting.size > 0 && scrollY === 0 && !paused && !isSelecting() && !document.querySelector("[data-extended]")) showWaiting();
}, { passive: true });
if (state) connect();
if (pauseButton && parts().length > 0) pauseButton.hidden = false;
growRows();

// Keys.

/** Rows and items, each with what gets the focus. */
const rows = () => {
  const all = [...document.querySelectorAll("main :is(tbody tr, details.item > summary, section.item, .line)")];
  return all.filter((row) => (row.checkVisibility?.() ?? true) && focusOf(row));
};
const focusOf = (row) => (row.matches("summary") ? row : row.querySelector("a, summary, button"));
const move = (step) => {
  const all = rows();
  const at = all.findIndex((row) => row.hasAttribute("data-active"));
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  if (!next) return;
  if (at >= 0) all[at].removeAttribute("data-active");
  next.setAttribute("data-active", "");
  focusOf(next).focus();
};
const pause = () => {
  if (isLoggedOut) return;
  paused = !paused;
  if (pauseButton) {
    pauseButton.textContent = paused ? "Resume" : "Pause";
    pauseButton.setAttribute("aria-label", `${pauseButton.textContent} updates`);
  }
  if (paused) { disconnect(); say("Paused"); } else connect();
};
pauseButton?.addEventListener("click", pause);
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

// The time where the reader is, beside UTC, while the pointer is over a time.
document.addEventListener("mouseover", ({ target }) => {
  const at = target.closest?.("time[datetime]");
  if (at && !at.title.includes(" here")) at.title = `${new Date(at.dateTime).toLocaleString()} here, ${at.title}`;
});

// A box in the head of a table selects all rows that are shown.
for (const box of document.querySelectorAll("thead input[type=checkbox]")) box.hidden = false;
document.addEventListener("change", (event) => {
  if (!event.target.matches("thead input[type=checkbox]")) return;
  for (const box of event.target.closest("table").querySelectorAll("tbody input[type=checkbox]")) box.checked = event.target.checked;
});

// A form that was sent cannot be sent again by a second click, until the reader comes back to the page.
document.addEventListener("submit", (event) => {
  for (const button of event.target.querySelectorAll("button:enabled")) {
    sent.add(button);
    setTimeout(() => { button.disabled = true; }, 0);
  }
});
