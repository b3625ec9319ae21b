// What stands in tables. `data-counter` and `data-gauge` name the number in /metrics that a cell shows.

import { at, html, number, table, text } from "./dom.js";
import { bytes, count, exact, percent, seconds, short } from "./units.js";
import { look } from "./picture.js";
import { ratesOf, tiersOf } from "./chart.js";

const MOST = 20;
const LONG = "long";  // may be broken anywhere, so that what an engine calls itself pushes nothing out of sight

export function tiers(status) {
  const rows = Object.entries(status.tiers).map(([name, its]) => {
    const counted = (counter) => exact(status.counters[counter] ?? 0);
    const left = Object.entries(status.counters).filter(([key]) => key.startsWith(`evicted_blocks_total/${name}/`));
    return [
      name,
      number(exact(its.used_bytes), { "data-gauge": `tier_used_bytes/${name}` }),
      number(its.capacity_bytes ? exact(its.capacity_bytes) : "–"),
      number(its.capacity_bytes ? percent(its.used_bytes / its.capacity_bytes) : "–"),
      number(counted(`arrived_blocks_total/${name}`), { "data-counter": `arrived_blocks_total/${name}` }),
      number(exact(left.reduce((sum, [, value]) => sum + value, 0))),
      number(counted(`hit_tokens_total/${name}`), { "data-counter": `hit_tokens_total/${name}` }),
      { text: its.trouble ?? "", class: LONG },
    ];
  });
  table(at("tiers"), ["tier", number("bytes used"), number("capacity"), number("full"), number("blocks came"),
    number("left"), number("tokens hit"), "trouble"], rows, "none");
}

export function hits(status, history) {
  const { asked, hit, ceiling } = status.asked_tokens;
  text(at("share"), asked
    ? `${exact(hit)} of ${exact(asked)} tokens asked for were there: ${percent(hit / asked)}. An endless cache: about ${percent(ceiling / asked)}.`
    : "Nothing was asked for yet.");
  const names = tiersOf(status), rates = ratesOf(history, names);
  const item = (look_, name, rate) => html("li", {}, html("span", { class: `swatch ${look_}` }), `${name}: ${count(rate)} tokens/s`);
  at("legend").replaceChildren(
    ...names.map((tier, place) => item(look(tier), `from ${tier}`, rates.hit[place])),
    item("line ceiling", "ceiling", rates.ceiling), item("line asked", "asked for", rates.asked));
}

export function edges(status) {
  const rows = Object.entries(status.edges).map(([name, its]) => [
    name,
    number(exact(its.calls.count), { "data-gauge": `edge_call_seconds_count/${name}` }),
    number(seconds(its.calls.p50_s)), number(seconds(its.calls.p95_s)), number(seconds(its.calls.p99_s)),
    number(its.bytes_per_s ? `${bytes(its.bytes_per_s)}/s` : "–"),
    number(bytes(its.pending_bytes)),
    its.breaker_open ? "open: left alone for a while" : "closed",
  ]);
  table(at("edges"), ["edge", number("calls"), number("p50"), number("p95"), number("p99"), number("speed"),
    number("pending"), "breaker"], rows, "no colder tier");
}

export function hot(status) {
  table(at("hot"), ["ends with block", number("blocks"), number("tokens"), number("loads"), number("tokens saved"), "is in", "namespace"],
    status.hot.slice(0, MOST).map((one) => [
      { text: short(one.hash), class: "mono" }, number(exact(one.blocks)), number(exact(one.tokens)), number(one.loads.toFixed(1)),
      number(count(one.loads * one.tokens)), one.tiers.join(", ") || "no tier any more",
      { text: short(one.namespace), class: "mono" },
    ]), "nothing was loaded of late");
}

export function sessions(status) {
  table(at("sessions"), ["engine", number("pid"), number("connections"), number("leased blocks"), number("drafts"), number("calls")],
    status.sessions.sessions.slice(0, MOST).map((one) => [
      { text: one.owner, class: LONG }, number(one.pid), number(one.connections), number(exact(one.leased_blocks)),
      number(one.drafts), number(exact(one.calls)),
    ]), "no engine is connected", status.sessions.count - MOST);
}

export function leases(status) {
  const ends = (one) => (one.ends_in_s === null ? "no end"
    : one.overdue ? `overdue by ${seconds(-one.ends_in_s)}` : `in ${seconds(one.ends_in_s)}`);
  table(at("leases"), ["holder", number("blocks"), "ends", "namespace"],
    status.leases.leases.slice(0, MOST).map((one) => [
      { text: one.owner, class: LONG }, number(exact(one.blocks)), ends(one), { text: short(one.namespace), class: "mono" },
    ]), "none is out", status.leases.count - MOST);
}

const matching = (rows, id) => {
  const wanted = at(id).value.trim().toLowerCase();
  return rows.filter((row) => row.join(" ").toLowerCase().includes(wanted));
};

export function counters(status) {
  const rows = matching(Object.entries(status.counters).sort(), "counter-filter");
  table(at("counters"), ["counter", number("so far")], rows.map(([name, value]) => [
    { text: name, class: `mono ${LONG}` }, number(exact(value), { "data-counter": name }),
  ]), "none");
}

export function settings(status) {
  const rows = status.configuration.map((one) => [one.key, one.value === null ? "unset" : String(one.value), one.origin]);
  table(at("settings"), ["setting", "value", "from"], matching(rows, "setting-filter").map(([key, value, origin]) => [
    { text: key, class: `mono ${LONG}` }, { text: value, class: LONG }, { text: origin, class: LONG },
  ]), "none");
}
