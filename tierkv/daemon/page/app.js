// Asks for the status every two seconds and shows it. Nothing is asked while the page is paused or out of sight.

import { ask, Refused, token } from "./ask.js";
import { at, html, text } from "./dom.js";
import { chart } from "./chart.js";
import { Events } from "./events.js";
import { History } from "./history.js";
import { picture } from "./picture.js";
import { seconds } from "./units.js";
import * as tables from "./tables.js";

const PERIOD_MS = 2000;
const PATIENCE_MS = 10_000;  // a daemon that is stopped but not gone keeps its connections open
const history = new History();
let events = null, status = null, timer = null, paused = false, configured = null, shownAt = null;

function draw() {
  if (!status || at("numbers").hidden) return;
  for (const [id, paint] of [["picture", picture], ["chart", chart]]) {
    const width = Math.max(280, at(id).clientWidth);
    at(id).replaceChildren(paint(width, status, history));
  }
}

function show() {
  const { health } = status;
  text(at("health"), health.ready ? health.state : `${health.state}, not ready`);
  at("health").className = `pill ${health.state}`;
  text(at("about"), `${status.release}, process ${status.pid}, up ${seconds(status.up_s)}`);
  at("reasons").replaceChildren(...health.reasons.map((one) => html("li", {}, `${one.part}: ${one.sentence}`)));
  for (const part of ["tiers", "edges", "hot", "sessions", "leases", "counters"]) tables[part](status);
  tables.hits(status, history);
  if (configured !== status.started_at) tables.settings(status);  // they change only with a new daemon
  configured = status.started_at;
  draw();
  if (events.dirty) events.show();
  shownAt = new Date().toLocaleTimeString("en-GB");
  text(at("when"), `As of ${shownAt}`);
  at("when").dataset.upS = status.up_s;
}

async function look() {
  clearTimeout(timer);
  try {
    status = await ask("v1/status", AbortSignal.timeout(PATIENCE_MS));
    at("ask-token").hidden = true;
    at("numbers").hidden = false;
    events ??= new Events();
    if (!paused && !document.hidden) events.begin();
    history.add(status);
    show();
  } catch (error) {
    if (error instanceof Refused) return refused(error.message);
    text(at("health"), "does not answer");
    at("health").className = "pill away";
    const why = error.name === "TimeoutError" ? `no answer in ${PATIENCE_MS / 1000} s` : error.message || error;
    text(at("when"), `${shownAt ? `As of ${shownAt}; ` : ""}${why}; asking again`);
  }
  if (!paused && !document.hidden) timer = setTimeout(look, PERIOD_MS);
}

function refused(why) {
  token.forget();
  events?.end();
  at("numbers").hidden = true;
  at("ask-token").hidden = false;
  text(at("health"), "token needed");
  if (why) text(at("token-why"), why);
  at("token").focus();
}

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("token").value.trim();
  at("token").value = "";
  if (!/^[!-~]+$/.test(given)) return refused("This is not the daemon's token.");  // no header can hold it
  token.set(given);
  look();
});

function setPaused(value) {
  paused = value;
  at("pause").setAttribute("aria-pressed", String(paused));
  if (paused) { clearTimeout(timer); events?.end(); } else look();
}

at("pause").addEventListener("click", () => setPaused(!paused));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) events?.end();  // a daemon has few places for those who listen
  else if (!paused) look();
});

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  text(at("theme"), dark ? "Light" : "Dark");
}

const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = localStorage.getItem("tierkv-theme");
setTheme(chosen ? chosen === "dark" : system.matches);
system.addEventListener("change", () => { if (!localStorage.getItem("tierkv-theme")) setTheme(system.matches); });
at("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  localStorage.setItem("tierkv-theme", dark ? "dark" : "light");
  setTheme(dark);
});

at("counter-filter").addEventListener("input", () => status && tables.counters(status));
at("setting-filter").addEventListener("input", () => status && tables.settings(status));
new ResizeObserver(draw).observe(at("main"));
if (document.documentElement.dataset.token === "needed" && !token.get()) refused("");
else look();
