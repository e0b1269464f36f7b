"use strict";
// Draws status.json every five seconds. Figures reach the page as text only, never as markup.

const EVERY_MS = 5000;
const byId = (id) => document.getElementById(id);

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

const count = (n) => (n == null ? "–" : n.toLocaleString("en", { maximumFractionDigits: n < 100 ? 1 : 0 }));
const millis = (n) => (n == null ? "–" : n < 1 ? `${(n * 1000).toFixed(0)} µs` : `${n.toFixed(1)} ms`);

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${n.toFixed(at ? 1 : 0)} ${units[at]}`;
}

function ago(seconds) {
  if (seconds == null) return "never";
  if (seconds < 120) return `${seconds} s ago`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

function table(id, heads, rows, empty) {
  const parts = [];
  if (rows.length === 0) {
    parts.push(element("caption", empty));
  } else {
    const head = element("tr");
    heads.forEach((text) => head.append(element("th", text)));
    parts.push(head);
  }
  for (const cells of rows) {
    const row = element("tr");
    // A cell is a text, or a text with a kind.
    cells.forEach((cell) => row.append(Array.isArray(cell) ? element("td", cell[0], cell[1]) : element("td", cell)));
    parts.push(row);
  }
  byId(id).replaceChildren(...parts);
}

function tiles(figures) {
  const { now } = figures;
  const tile = (label, value, kind) => {
    const made = element("div", undefined, "tile");
    made.append(element("b", value, kind), element("span", label, "unit"));
    return made;
  };
  byId("tiles").replaceChildren(
    tile("answered a second", count(now.answered_per_s)),
    tile("refused a second", count(now.refused_per_s)),
    tile("failed a second", count(now.failed_per_s), now.failed_per_s > 0 ? "bad" : "good"),
    tile("clients gone a second", count(now.gone_per_s)),
    tile("own time, median", millis(now.own_p50_ms)),
    tile("own time, p99", millis(now.own_p99_ms)),
    tile("in flight", count(figures.in_flight)),
    tile("waiting pops", count(figures.parked)),
    tile("held bodies", bytes(figures.buffered_bytes)),
  );
}

function chart(label, values, show) {
  const most = Math.max(...values.map((value) => value ?? 0), 0);
  const last = values.length ? values[values.length - 1] : null;
  const figure = element("figure");
  const caption = element("figcaption");
  caption.append(element("span", label), element("span", `now ${show(last)} · most ${show(most)}`, "unit"));
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 360 50");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${label}: now ${show(last)}, most ${show(most)}`);
  const path = document.createElementNS(space, "path");
  // The newest is at the right edge; a gap in the figures is a gap in the line.
  let pen = "M";
  let line = "";
  values.forEach((value, at) => {
    if (value == null) {
      pen = "M";
      return;
    }
    const x = 360 - (values.length - 1 - at);
    line += `${pen}${x} ${(48 - (most ? value / most : 0) * 46).toFixed(1)}`;
    pen = "L";
  });
  path.setAttribute("d", line);
  svg.append(path);
  figure.append(caption, svg);
  return figure;
}

function charts({ history }) {
  byId("charts").replaceChildren(
    chart("answered a second", history.answered, count),
    chart("refused a second", history.refused, count),
    chart("failed a second", history.failed, count),
    chart("own time, p99", history.own_p99_ms, millis),
    chart("waiting pops", history.parked, count),
    chart("in flight", history.in_flight, count),
  );
}

function state(figures) {
  const control = figures.control;
  const troubles = [];
  if (figures.draining) troubles.push("draining");
  if (control?.silent) troubles.push("the control plane's database is silent: serving what was last known");
  if (control && !control.listening) troubles.push("changes are not heard of at once");
  if (figures.limits_store && !figures.limits_store.present) troubles.push("limits are not shared: their store is away");
  if (figures.usage.spool_files > 1) troubles.push("usage waits on disk");
  if (figures.usage.rows_dropped > 0) troubles.push("usage was lost");
  if (figures.now.failed_per_s > 0) troubles.push("requests fail");
  if (!figures.enforce) troubles.push("caps only count (shadow mode)");
  byId("state").textContent = troubles.length ? troubles.join("; ") : "all well";
  byId("state").className = troubles.length ? "warn" : "good";
  byId("about").textContent = `version ${figures.version}, up since ${new Date((figures.at_s - figures.up_s) * 1000).toISOString()}`;
}

function draw(figures) {
  state(figures);
  tiles(figures);
  charts(figures);
  table(
    "refusals",
    ["code", "status", "last minute", "last hour", "since start"],
    figures.refusals.map((row) => [
      [row.code, row.status >= 500 ? "bad" : ""],
      row.status || "–",
      count(row.last_minute),
      count(row.last_hour),
      count(row.since_start),
    ]),
    "none since the start",
  );
  table(
    "clusters",
    ["cluster", "requests", "refused", "failed", "gone", "messages", "cell's time"],
    figures.clusters.map((row) => [
      row.cluster,
      count(row.requests),
      count(row.refused),
      [count(row.failed), row.failed ? "bad" : ""],
      count(row.gone),
      count(row.messages),
      millis(row.cell_us == null ? null : row.cell_us / 1000),
    ]),
    "no traffic yet",
  );
  const control = figures.control;
  table(
    "control",
    ["", ""],
    control
      ? [
          ["database", control.silent ? ["silent", "bad"] : ["answers", "good"]],
          ["listener", control.listening ? ["connected", "good"] : ["away", "bad"]],
          ["last word from it", ago(control.heard_s_ago)],
          ["connections", `${control.pool.open} open, ${control.pool.idle} idle, at most ${control.pool.most}`],
        ]
      : [],
    "this proxy has none",
  );
  table(
    "caches",
    ["cache", "entries", "absences", "oldest", "hits", "asked", "stale"],
    (control?.caches ?? []).map((row) => [
      row.cache,
      count(row.entries),
      count(row.absences),
      row.oldest_s == null ? "–" : `${row.oldest_s} s`,
      count(row.hits),
      count(row.loads),
      [count(row.stale), row.stale ? "warn" : ""],
    ]),
    "none",
  );
  table(
    "cells",
    ["cell", "last listing"],
    (figures.cells ?? []).map((row) => [row.cell, [ago(row.answered_s_ago), row.answered_s_ago == null ? "warn" : ""]]),
    "none asked yet",
  );
  const usage = figures.usage;
  table(
    "usage",
    ["", ""],
    [
      ["written", ago(usage.written_s_ago)],
      ["rolled up by this proxy", ago(usage.rolled_up_s_ago)],
      ["failed flushes", [count(usage.flush_failures), usage.flush_failures ? "warn" : ""]],
      ["on disk", `${count(usage.spool_files)} files, ${bytes(usage.spool_bytes)}`],
      ["rows lost", [count(usage.rows_dropped), usage.rows_dropped ? "bad" : ""]],
      ["clusters over their month", count(usage.month_blocked_clusters)],
    ],
    "",
  );
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    draw(await answer.json());
  } catch (error) {
    byId("state").textContent = `no answer from the proxy (${error.message}); the figures below are old`;
    byId("state").className = "bad";
  }
  setTimeout(refresh, EVERY_MS);
}

refresh();
