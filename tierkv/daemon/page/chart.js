// Tokens a second that requests asked for, got from each tier, and would have got from an endless cache.

import { count } from "./units.js";
import { svg } from "./dom.js";
import { look } from "./picture.js";

const HEIGHT = 210, LEFT = 48, BOTTOM = 22, TOP = 8;

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export const tiersOf = (status) => Object.keys(status.tiers);

export function ratesOf(history, tiers, place) {
  return {
    hit: tiers.map((tier) => history.counter(`hit_tokens_total/${tier}`, place)),
    ceiling: history.rate((sample) => sample.tokens.ceiling ?? 0, place),
    asked: history.rate((sample) => sample.tokens.asked, place),
  };
}

export function chart(width, status, history) {
  const { samples } = history, tiers = tiersOf(status);
  const rates = samples.map((_, place) => ratesOf(history, tiers, place));
  if (rates.length > 1) rates[0] = rates[1];  // nothing came before the first
  const most = nice(Math.max(10, ...rates.flatMap((rate) => [rate.asked, rate.ceiling, rate.hit.reduce((a, b) => a + b, 0)])));
  const end = samples.at(-1).at, span = Math.max(60, end - samples[0].at);
  const x = (place) => LEFT + (width - LEFT - 6) * (1 - (end - samples[place].at) / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
  const drawn = [];
  for (const share of [0, 0.5, 1]) {
    drawn.push(
      svg("line", { class: "axis", x1: LEFT, x2: width - 6, y1: y(share * most), y2: y(share * most) }),
      svg("text", { class: "faint", x: LEFT - 6, y: y(share * most) + 4, "text-anchor": "end" }, count(share * most)));
  }
  drawn.push(
    svg("text", { class: "faint", x: LEFT, y: HEIGHT - 5 }, `${Math.round(span / 60)} min ago`),
    svg("text", { class: "faint", x: width - 6, y: HEIGHT - 5, "text-anchor": "end" }, "now"));
  const floor = rates.map(() => 0);
  tiers.forEach((tier, number) => {
    const under = [...floor];
    rates.forEach((rate, place) => { floor[place] += rate.hit[number]; });
    const up = floor.map((value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`);
    const back = under.map((value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`).reverse();
    drawn.push(svg("path", { class: `area ${look(tier)}`, d: `M${[...up, ...back].join(" L")} z` }));
  });
  for (const line of ["asked", "ceiling"]) {
    const points = rates.map((rate, place) => `${x(place).toFixed(1)} ${y(rate[line]).toFixed(1)}`);
    drawn.push(svg("path", { class: `curve ${line}`, d: `M${points.join(" L")}` }));
  }
  const now = rates.at(-1);
  const words = tiers.map((tier, number) => `${count(now.hit[number])} from ${tier}`).join(", ");
  const label = `Tokens a second: ${words}; ceiling ${count(now.ceiling)}, asked for ${count(now.asked)}`;
  return svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": label }, ...drawn);
}
