// The event stream: what came, what left, the newest first.

import { at, html, table } from "./dom.js";
import { exact, short } from "./units.js";
import { listen } from "./ask.js";

const KINDS = ["stored", "removed", "arrived", "left", "cleared"];
const MOST = 200, SHOWN = 100, AGAIN_MS = 3000;

export class Events {
  constructor() {
    this.kept = [];
    this.missed = 0;
    this.heard = 0;
    this.last = null;
    this.stop = null;
    this.refused = "";
    for (const kind of KINDS) {
      const box = html("input", { type: "checkbox", checked: "", value: kind });
      box.addEventListener("change", () => this.show());
      at("kinds").append(html("label", {}, box, kind));
    }
    this.show();
  }

  // Listens until `end`; a connection that breaks is made anew, and says what was missed meanwhile.
  async begin() {
    if (this.stop) return;
    const stop = this.stop = new AbortController();
    while (!stop.signal.aborted) {
      const after = this.last === null ? "" : `&after=${this.last}`;
      try {
        await listen(`v1/events?most=${SHOWN}${after}`, stop.signal, () => this.say(""),
          (name, data, id) => this.hear(name, data, id));
      } catch (error) {
        if (stop.signal.aborted) return;
        this.last = null;
        this.say(`; no events come (${error.message}), asking again`);
      }
      if (!stop.signal.aborted) await new Promise((done) => { setTimeout(done, AGAIN_MS); });
    }
  }

  end() {
    this.stop?.abort();
    this.stop = null;
  }

  say(refused) {
    this.refused = refused;
    this.dirty = true;
  }

  hear(name, data, id) {
    this.last = id;
    if (name === "gap") this.missed += data.missed;
    if (name === "blocks") {
      this.heard += data.length;
      this.kept = [...data.reverse(), ...this.kept].slice(0, MOST);
    }
    this.dirty = true;
  }

  show() {
    this.dirty = false;
    const wanted = new Set([...at("kinds").querySelectorAll("input:checked")].map((box) => box.value));
    const rows = this.kept.filter((event) => wanted.has(event.kind)).slice(0, SHOWN).map((event) => [
      { text: exact(event.seq), class: "mono" },
      new Date(event.at * 1000).toLocaleTimeString("en-GB"), event.kind, event.tier ?? "", event.reason ?? "",
      { text: event.hash ? short(event.hash) : "", class: "mono" },
      { text: short(event.namespace), class: "mono" },
    ]);
    table(at("events"), ["number", "time", "what", "tier", "why", "block", "namespace"], rows, "nothing yet");
    at("missed").textContent = `${exact(this.heard)} heard, ${exact(this.missed)} left out because too many came at once${this.refused}`;
  }
}
