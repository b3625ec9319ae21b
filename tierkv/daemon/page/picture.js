// The tiers as a picture: how full each is, and what moves between them. Drawn for the width there is.

import { bytes, count } from "./units.js";
import { svg } from "./dom.js";

const BOX = 84, GAP = 64, MARGIN = 2;
const NARROW = 240;  // here a tier's name and what ails it have no room side by side
const KNOWN = ["host", "nvme", "valkey"];

export const look = (tier) => (KNOWN.includes(tier) ? tier : "other");

// What a tier does not do, in words; null where it is well.
function ailment(tier) {
  if (tier.reachable === false) return "! does not answer";
  if (tier.writable === false) return "! takes nothing";
  return tier.trouble ? "! does not answer" : null;
}

function box(x, y, width, name, tier) {
  const inner = width - 20;
  const bar = svg("g", {}, svg("rect", { class: "room", x: x + 10, y: y + 30, width: inner, height: 16, rx: 3 }));
  const capacity = tier.capacity_bytes;
  if (capacity) {
    const part = (size) => Math.max(0, Math.min(1, size / capacity)) * inner;
    const clean = tier.clean_bytes ?? tier.used_bytes;
    bar.append(
      svg("rect", { class: `fill ${look(name)} dirty`, x: x + 10, y: y + 30, width: part(tier.used_bytes), height: 16, rx: 3 }),
      svg("rect", { class: `fill ${look(name)}`, x: x + 10, y: y + 30, width: part(clean), height: 16, rx: 3 }));
  }
  const room = capacity ? `${bytes(tier.used_bytes)} of ${bytes(capacity)}` : `${bytes(tier.used_bytes)} used`;
  const clean = tier.clean_bytes !== undefined && width > 300 ? `, ${bytes(tier.clean_bytes)} clean` : "";
  const ill = ailment(tier), beside = width >= NARROW;
  return svg("g", {},
    svg("rect", { class: ill ? "box ill" : "box", x, y, width, height: BOX, rx: 8 }),
    svg("text", { class: "name", x: x + 10, y: y + 21 }, name === "host" ? "host RAM" : name), bar,
    ...(!ill || beside ? [svg("text", { class: "faint", x: x + 10, y: y + 66 }, room + clean)] : []),
    ...(ill ? [beside ? svg("text", { class: "trouble", x: x + width - 10, y: y + 21, "text-anchor": "end" }, ill)
      : svg("text", { class: "trouble", x: x + 10, y: y + 66 }, ill)] : []));
}

// An arrow with its speed beside it.
function arrow(x, from, to, speed, words, side) {
  const moving = speed > 0 ? " moving" : "";
  const width = speed > 0 ? Math.min(6, 1.5 + Math.log10(1 + speed / 1e4)) : 1.5;
  const tip = to > from ? to - 7 : to + 7;
  return svg("g", {},
    svg("line", { class: `flow${moving}`, x1: x, y1: from, x2: x, y2: tip, "stroke-width": width }),
    svg("path", { class: `head${moving}`, d: `M${x - 6} ${tip} h12 L${x} ${to} z` }),
    // One higher than the other: on a narrow screen the words of two arrows share a line's width.
    svg("text", { class: "faint", x: x + (side === "left" ? -10 : 10), y: (from + to) / 2 + (side === "left" ? -4 : 14),
      "text-anchor": side === "left" ? "end" : "start" }, words));
}

export function picture(width, status, history) {
  const colder = Object.keys(status.tiers).filter((name) => name !== "host");
  const whole = width - 2 * MARGIN;
  const top = MARGIN + 34, host = top + GAP, below = host + BOX + GAP;
  const height = colder.length ? below + BOX + MARGIN : host + BOX + MARGIN;
  const crowd = `${status.sessions.count} ${status.sessions.count === 1 ? "session" : "sessions"}`;
  const words = [crowd];
  const stored = history.counter("stored_bytes_total/host");
  const given = history.counter("leased_blocks_total");
  const drawn = [
    svg("rect", { class: "box", x: MARGIN, y: MARGIN, width: whole, height: 32, rx: 8 }),
    svg("text", { class: "name", x: MARGIN + 10, y: MARGIN + 21 }, "engines"),
    svg("text", { class: "faint", x: MARGIN + whole - 10, y: MARGIN + 21, "text-anchor": "end" }, crowd),
    arrow(MARGIN + whole / 2 - 14, top + 2, host - 2, stored, `${bytes(stored)}/s stored`, "left"),
    arrow(MARGIN + whole / 2 + 14, host - 2, top + 2, given && 1e5 * given, `${count(given)} blocks/s leased`, "right"),
    box(MARGIN, host, whole, "host", status.tiers.host),
  ];
  words.push(`host RAM: ${bytes(status.tiers.host.used_bytes)} of ${bytes(status.tiers.host.capacity_bytes)}`);
  const each = (whole - 10 * (colder.length - 1)) / Math.max(1, colder.length);
  colder.forEach((name, place) => {
    const x = MARGIN + place * (each + 10);
    const down = history.counter(`written_bytes_total/${name}`), up = history.counter(`read_bytes_total/${name}`);
    drawn.push(
      arrow(x + each / 2 - 12, host + BOX + 2, below - 2, down, `${bytes(down)}/s`, "left"),
      arrow(x + each / 2 + 12, below - 2, host + BOX + 2, up, `${bytes(up)}/s`, "right"),
      box(x, below, each, name, status.tiers[name]));
    words.push(`${name}: ${bytes(status.tiers[name].used_bytes)} used`);
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": words.join("; ") }, ...drawn);
}
