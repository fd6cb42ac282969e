// Requests as trees: one card per request, one line per fork, one cell per branch.

const LINGER_MS = 4000;
const SERIAL = "\u0000serial";
const cards = new Map(); // id of a request -> card
const branches = new Map(); // cell -> what is known of its branch
const byId = (id) => document.getElementById(id);
let serverNow = 0;

function element(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function setAttr(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

function treeItem(name, className, parent, level) {
  const item = element(name, className, parent);
  item.setAttribute("role", "treeitem");
  item.setAttribute("aria-level", level);
  item.tabIndex = -1;
  return item;
}

function newCard(id) {
  const box = element("div", "request");
  box.setAttribute("role", "none");
  const title = treeItem("div", "title", box, 1);
  const name = element("span", "id", title, id === SERIAL ? "without branches" : shortId(id));
  name.title = id === SERIAL ? "" : id;
  const facts = ["counts", "age", "ttft", "tpot"].map((f) => element("span", `fact ${f}`, title));
  const card = { id, box, title, facts, forks: new Map(), cells: new Map(), endedAt: null };
  if (id !== SERIAL) title.dataset.id = id;
  cards.set(id, card);
  byId("requests").append(box);
  return card;
}

// Rows of the table of branches as objects.
function rowsOf(request, deferrals) {
  const table = request.branches;
  return table.rid.map((rid, i) => ({
    rid, parent: table.parent[i], branch: table.branch[i], width: table.width[i],
    depth: table.depth[i], stage: table.stage[i], status: table.status[i],
    output_tokens: table.output_tokens[i], steps_run: table.steps_run[i],
    steps_deferred: table.steps_deferred[i],
    mark: table.deferral[i] === null ? null : deferrals[table.deferral[i]],
  }));
}

// Lines in the order of a walk through the tree: below a branch come its own forks.
function forksOf(rows) {
  const forks = new Map();
  for (const row of rows) {
    const key = `${row.depth}/${row.stage}/${row.parent ?? ""}`;
    if (!forks.has(key)) forks.set(key, { key, ...row, rows: [] });
    forks.get(key).rows.push(row);
  }
  const known = new Set(rows.map((row) => row.rid));
  const below = new Map();
  const roots = [];
  for (const fork of forks.values()) {
    if (fork.parent && known.has(fork.parent)) {
      below.set(fork.parent, [...(below.get(fork.parent) ?? []), fork]);
    } else roots.push(fork);
  }
  const walked = new Set();
  const ordered = [];
  const walk = (fork, level, above) => {
    if (walked.has(fork)) return;
    walked.add(fork);
    ordered.push({ ...fork, level, above });
    for (const row of fork.rows) for (const child of below.get(row.rid) ?? []) walk(child, level + 1, row);
  };
  roots.sort((a, b) => a.depth - b.depth || a.stage - b.stage);
  for (const fork of roots) walk(fork, 1 + fork.depth);
  for (const fork of forks.values()) walk(fork, 1 + fork.depth);
  return ordered;
}

function showFork(card, fork, before) {
  let line = card.forks.get(fork.key);
  if (!line) {
    const box = element("div", `fork d${Math.min(fork.level, 5)}`);
    box.setAttribute("role", "none");
    const name = treeItem("div", "name", box, 1 + fork.level);
    const cells = element("div", "cells", box);
    cells.setAttribute("role", "none");
    line = { box, name, cells };
    card.forks.set(fork.key, line);
  }
  const after = before ? before.nextSibling : card.title.nextSibling;
  if (line.box !== after) card.box.insertBefore(line.box, after);
  setText(line.name, forkName(fork, fork.above));
  for (const row of fork.rows) showCell(card, line, fork, row);
  return line.box;
}

function showCell(card, line, fork, row) {
  let cell = card.cells.get(row.rid);
  if (!cell) {
    cell = treeItem("div", "cell", line.cells, 2 + fork.level);
    card.cells.set(row.rid, cell);
  }
  branches.set(cell, row);
  if (cell.dataset.status !== row.status) {
    cell.dataset.status = row.status;
    cell.setAttribute("aria-label", `branch ${row.branch + 1}, ${row.status}`);
  }
}

function countStatuses(rows) {
  const counts = Object.fromEntries(STATUSES.map((s) => [s, 0]));
  for (const row of rows) counts[row.status] += 1;
  return counts;
}

function late(value, slo) {
  return value !== null && value > slo;
}

function showFacts(card, request, counts) {
  const [words, age, ttft, tpot] = card.facts;
  setText(words, countsText(counts));
  if (card.id === SERIAL) return;
  setText(age, `${ms(request.age_ms)} old, ${plural(request.num_tokens, "token")}`);
  for (const [box, name, value, slo] of [
    [ttft, "TTFT", request.ttft_ms, request.ttft_slo_ms],
    [tpot, "TPOT", request.tpot_ms, request.tpot_slo_ms],
  ]) {
    const isLate = late(value, slo);
    setText(box, `${name} ${ms(value)} of ${ms(slo)}${isLate ? " (late)" : ""}`);
    box.classList.toggle("bad", isLate);
  }
}

// All requests of the state, and the totals by status.
function showRequests(state) {
  serverNow = state.now_ms;
  const seen = new Set();
  const total = countStatuses([]);
  const single = [];
  for (const request of state.requests) {
    const rows = rowsOf(request, state.deferrals);
    if (request.is_group) showRequest(request.id, request, rows, seen, total);
    else single.push(...rows.map((row) => ({ ...row, depth: 0, stage: 0, parent: null })));
  }
  if (single.length) showRequest(SERIAL, { is_group: false }, single, seen, total);
  dropEnded(seen);
  for (const status of STATUSES) setText(byId(`num-${status}`), count(total[status]));
  setText(byId("num-requests"), count(state.requests.length));
  byId("empty").hidden = cards.size > 0;
  byId("left-out").hidden = !state.num_requests_left_out;
  setText(byId("left-out"), `${plural(state.num_requests_left_out, "newer request")} not shown.`);
  keepOneTabStop();
}

function showRequest(id, request, rows, seen, total) {
  const card = cards.get(id) ?? newCard(id);
  seen.add(id);
  card.endedAt = null;
  card.box.classList.remove("ended");
  let before = null;
  for (const fork of forksOf(rows)) before = showFork(card, fork, before);
  forgetCells(card, new Set(rows.map((row) => row.rid)));
  const counts = countStatuses(rows);
  for (const status of STATUSES) total[status] += counts[status];
  showFacts(card, request, counts);
}

function forgetCells(card, rids) {
  for (const [rid, cell] of card.cells) {
    if (rids.has(rid) || isLookedAt()) continue;
    branches.delete(cell);
    cell.remove();
    card.cells.delete(rid);
  }
  for (const [key, line] of card.forks) {
    if (line.cells.childElementCount) continue;
    line.box.remove();
    card.forks.delete(key);
  }
}

// While somebody points at a tree or walks through it, nothing moves away under it.
function isLookedAt() {
  const forest = byId("requests");
  return forest.matches(":hover") || forest.contains(document.activeElement);
}

function dropEnded(seen) {
  const now = performance.now();
  for (const card of cards.values()) {
    if (seen.has(card.id)) continue;
    if (card.endedAt === null) endCard(card, now);
    if (now - card.endedAt < LINGER_MS || isLookedAt()) continue;
    for (const cell of card.cells.values()) branches.delete(cell);
    card.box.remove();
    cards.delete(card.id);
  }
}

function endCard(card, now) {
  card.endedAt = now;
  card.box.classList.add("ended");
  for (const cell of card.cells.values()) {
    const row = branches.get(cell);
    if (row.status === "aborted") continue;
    Object.assign(row, { status: "done", mark: null });
    cell.dataset.status = "done";
    cell.setAttribute("aria-label", `branch ${row.branch + 1}, done`);
  }
  setText(card.facts[0], "ended");
}
