"use strict";
/* One predictor: the question of the controls goes to the server, its answer is drawn. */
(() => {
  const { Chart, make, logScale, linearScale, powers, TIMES, timeUnit, decades, time, bytes, money, count, digits } = window.tulaCharts;
  const $ = (id) => document.getElementById(id);
  const { controls, view: first } = JSON.parse($("state").textContent);
  const address = $("tula").dataset.view;
  const start = new URLSearchParams(location.search);

  /* ---- the question ---- */
  const PRICE_TOP = 40;
  const price = (position) => (position <= 0 ? 0 : Number((PRICE_TOP * (position / 100) ** 3).toPrecision(2)));
  const numbers = (text) => (text || "").split(",").map(Number).filter((n) => n > 0);
  const usual = { objective: "knee", epochs: 10, deadline: null, price: 0, nodes: controls.nodes_default, devices: controls.devices_default.join(","), memory: 100, current: "" };
  const asked = { ...usual };
  let span = [1, 1000];

  const read = () => {
    if (start.has("objective")) asked.objective = start.get("objective");
    if (start.has("epochs")) asked.epochs = start.get("epochs");
    if (start.get("deadline_s")) asked.deadline = Number(start.get("deadline_s"));
    if (start.get("usd_per_device_hour")) asked.price = Number(start.get("usd_per_device_hour"));
    if (start.get("nodes")) asked.nodes = Math.max(...numbers(start.get("nodes")));
    if (start.get("devices_per_node")) asked.devices = start.get("devices_per_node");
    if (start.get("memory_limit_bytes")) asked.memory = 100 * Number(start.get("memory_limit_bytes")) / controls.device_memory_bytes;
    if (start.get("current_global_batch_size")) asked.current = start.get("current_global_batch_size");
  };

  const query = () => {
    const out = new URLSearchParams();
    out.set("objective", asked.objective);
    out.set("epochs", asked.epochs);
    if (asked.deadline) out.set("deadline_s", asked.deadline);
    if (asked.price) out.set("usd_per_device_hour", asked.price);
    out.set("nodes", controls.nodes.filter((n) => n <= asked.nodes).join(",") || "1");
    out.set("devices_per_node", asked.devices);
    if (asked.memory < 100) out.set("memory_limit_bytes", Math.round(controls.device_memory_bytes * asked.memory / 100));
    if (asked.current) out.set("current_global_batch_size", asked.current);
    return out;
  };

  /* ---- the controls ---- */
  const deadlineAt = (position) => (position >= 100 ? null : Number((span[0] * (span[1] / span[0]) ** (position / 99)).toPrecision(2)));
  const deadlinePosition = (seconds) => (seconds ? Math.max(0, Math.min(99, 99 * Math.log(seconds / span[0]) / Math.log(span[1] / span[0]))) : 100);

  const write = () => {
    $("objective").value = asked.objective;
    $("epochs").value = asked.epochs;
    $("deadline").value = deadlinePosition(asked.deadline);
    $("price").value = 100 * Math.cbrt(asked.price / PRICE_TOP);
    $("nodes").value = Math.max(0, controls.nodes.filter((n) => n <= asked.nodes).length - 1);
    $("devices").value = asked.devices;
    $("memory-limit").value = asked.memory;
    $("current").value = asked.current;
    say();
  };
  const say = () => {
    $("deadline-text").value = asked.deadline ? time(asked.deadline, 2) : "none";
    $("price-text").value = asked.price ? money(asked.price) : "none";
    $("nodes-text").value = count(asked.nodes);
    $("memory-limit-text").value = bytes(controls.device_memory_bytes * asked.memory / 100);
    $("price").setAttribute("aria-valuetext", $("price-text").value);
    $("deadline").setAttribute("aria-valuetext", $("deadline-text").value);
    $("nodes").setAttribute("aria-valuetext", $("nodes-text").value);
  };

  const choices = () => {
    const lists = new Map();
    const all = controls.devices_default.join(",");
    lists.set(all, controls.devices_default.length > 1 ? `${controls.devices_default.join(" or ")} (measured)` : all);
    for (const n of controls.devices) if (!lists.has(String(n))) lists.set(String(n), String(n));
    if (!lists.has(asked.devices)) lists.set(asked.devices, asked.devices.replaceAll(",", " or "));
    $("devices").replaceChildren(...[...lists].map(([value, text]) => new Option(text, value)));
  };

  const listen = () => {
    const on = (id, set) => $(id).addEventListener("input", (event) => { set(event.target); say(); ask(); });
    on("objective", (it) => {
      asked.objective = it.value;
      if (it.value.startsWith("min_cost") && !asked.price) { asked.price = 1; write(); }
    });
    on("epochs", (it) => { asked.epochs = it.value; });
    on("deadline", (it) => { asked.deadline = deadlineAt(Number(it.value)); });
    on("price", (it) => {
      asked.price = price(Number(it.value));
      if (!asked.price && asked.objective.startsWith("min_cost")) { asked.objective = "knee"; write(); }
    });
    on("nodes", (it) => { asked.nodes = controls.nodes[Number(it.value)]; });
    on("devices", (it) => { asked.devices = it.value; });
    on("memory-limit", (it) => { asked.memory = Number(it.value); });
    on("current", (it) => { asked.current = it.value; });
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    $("reset").addEventListener("click", () => { Object.assign(asked, usual); choices(); write(); ask(); });
  };

  /* ---- asking: the newest question wins, one request at a time ---- */
  let running = false, again = false;
  const ask = async () => {
    if (running) { again = true; return; }
    running = true;
    $("decision").classList.add("stale");
    const text = query().toString();
    history.replaceState(null, "", `?${text}`);
    try {
      const response = await fetch(`${address}?${text}`, { headers: { Accept: "application/json" } });
      const answer = await response.json();
      if (response.ok) show(answer);
      else refuse(answer.error.message);
    } catch {
      refuse("the server does not answer");
    }
    running = false;
    if (again) { again = false; ask(); } else $("decision").classList.remove("stale");
  };

  /* ---- the answer in words ---- */
  const items = (list, texts, kind) => list.replaceChildren(...texts.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    if (kind) item.className = kind;
    return item;
  }));
  const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
  const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  const refuse = (message) => {
    $("error").textContent = sentence(message);
    $("error").hidden = false;
    $("decision").classList.add("refused");
    $("decision-label").textContent = "No choice";
    $("decision-layout").textContent = "";
    items($("warnings"), []);
  };

  const decide = (answer) => {
    const it = answer.decision;
    if (!it) { refuse(answer.error); items($("reasons"), [sentence(answer.error)]); return; }
    $("error").hidden = true;
    $("decision").classList.remove("refused");
    $("decision-label").textContent = "Train with";
    $("decision-batch").textContent = count(it.global_batch_size);
    $("version").textContent = answer.version;
    const world = it.nodes * it.devices_per_node;
    const passes = it.accumulation_steps > 1 ? ` × ${plural(it.accumulation_steps, "pass")}` : "";
    const nodes = it.nodes > 1 ? ` on ${plural(it.nodes, "node")}` : "";
    $("decision-layout").textContent = `${count(it.local_batch_size)} per device${passes} × ${plural(world, "device")}${nodes}`;
    $("time-label").textContent = answer.basis === "to target" ? "to target" : answer.basis;
    $("decision-time").textContent = time(it.time_s);
    $("decision-interval").textContent = it.time_s_lower === null ? "" : `${time(it.time_s_lower)} – ${time(it.time_s_upper)}`;
    const chosen = answer.points.find((point) => point.choice);
    $("decision-cost").textContent = money(chosen.cost_usd);
    $("decision-cost-sub").textContent = chosen.cost_usd === null ? "no price" : `${digits(chosen.device_hours)} device h`;
    $("decision-memory").textContent = bytes(it.peak_memory_bytes);
    $("decision-memory-sub").textContent = it.peak_memory_bytes === null ? "" : `of ${bytes(answer.limit_bytes)}`;
    items($("warnings"), it.warnings.map(sentence), "notice");
    items($("reasons"), it.reasons.map(sentence));
  };

  const table = (answer) => {
    const head = ["batch", "per device", "devices", "step", answer.basis, "cost", "memory", ""];
    const rows = answer.points.map((p) => {
      const marks = [p.choice && "choice", p.on_pareto && "front", p.measured && "measured", p.extrapolated && "beyond what was measured", !p.meets_limits && "misses a limit", !p.fits && p.fits_reason];
      return [p, [count(p.global_batch_size), count(p.local_batch_size), count(p.world_size), time(p.step_time_s), time(p.time_s), money(p.cost_usd), bytes(p.peak_memory_bytes), marks.filter(Boolean).join(", ")]];
    });
    const row = (tag, cells) => {
      const line = document.createElement("tr");
      for (const cell of cells) line.appendChild(document.createElement(tag)).textContent = cell;
      return line;
    };
    const lines = rows.map(([p, cells]) => {
      const line = row("td", cells);
      line.className = p.choice ? "choice" : p.fits && p.meets_limits ? "" : "off";
      return line;
    });
    $("candidates").replaceChildren(row("th", head), ...lines);
  };

  /* ---- the answer in pictures ---- */
  const note = (p) => [
    `batch ${count(p.global_batch_size)} on ${plural(p.world_size, "device")}`,
    `${count(p.local_batch_size)} per device${p.accumulation_steps > 1 ? ` × ${p.accumulation_steps} passes` : ""}, step ${time(p.step_time_s)}`,
    p.time_s_lower === null ? `${time(p.time_s)}` : `${time(p.time_s)} (${time(p.time_s_lower)} – ${time(p.time_s_upper)})`,
    [p.cost_usd !== null && money(p.cost_usd), p.peak_memory_bytes !== null && bytes(p.peak_memory_bytes)].filter(Boolean).join(", "),
    !p.fits ? p.fits_reason : !p.meets_limits ? "misses a limit" : p.extrapolated ? "beyond what was measured" : p.measured ? "measured" : "",
  ];
  const same = (a, b) => a.nodes === b.nodes && a.devices_per_node === b.devices_per_node;
  const chosenLine = (data) => data.lines.find((line) => line.chosen);
  const known = (values) => values.filter((value) => value !== null && value > 0);
  const batches = (sizes, area) => logScale(Math.min(...sizes) / 1.12, Math.max(...sizes) * 1.12, area.left, area.right, { ticks: powers, most: Math.max(3, (area.right - area.left) / 58), format: count });
  const seconds = (values, area, most = 7) => logScale(Math.min(...values) * .8, Math.max(...values) * 1.25, area.bottom, area.top, { ticks: TIMES, most, unit: timeUnit, format: (s) => time(s, 3) });

  const drawTime = (chart, data) => {
    const { area } = chart, chosen = chosenLine(data);
    const x = batches(data.lines.flatMap((line) => line.batch), area);
    const seen = known([...data.lines.flatMap((line) => line.time), ...chosen.time_lower, ...data.measured.map((row) => row.time_s)]);
    const y = seconds(data.deadline_s ? [...seen, data.deadline_s] : seen, area);
    chart.axes(x, y, "global batch size", data.basis === "to target" ? "time to the target" : `time for ${data.basis}`);
    chart.band(chosen.batch.map((b, at) => [x(b), chosen.time_lower[at] && y(chosen.time_lower[at]), chosen.time_upper[at] && y(chosen.time_upper[at])]));
    if (data.knee) chart.upright(x(data.knee), `knee ${count(data.knee)}`, "knee");
    for (const line of [...data.lines.filter((one) => !one.chosen), chosen]) {
      chart.curve(line.batch.map((b, at) => [x(b), line.time[at] === null ? null : y(line.time[at])]), line.extrapolated, line.chosen);
    }
    if (data.deadline_s) chart.across(y(data.deadline_s), `deadline ${time(data.deadline_s, 2)}`, true);
    for (const row of data.measured) {
      if (row.time_s) chart.dot(x(row.global_batch_size), y(row.time_s), same(row, chosen) ? "chosen" : "", 4.5);
    }
    let above = -99;
    for (const line of [...data.lines].sort((a, b) => b.time.at(-1) - a.time.at(-1))) {
      if (data.lines.length < 2 || line.time.at(-1) === null || (area.width < 480 && !line.chosen)) continue;
      const right = x(line.batch.at(-1)) > area.right - 190;
      const at = Math.max(y(line.time.at(-1)) - 7, above + 13);
      above = at;
      if (at > area.bottom - 2) continue;
      make("text", { x: right ? x(line.batch.at(-1)) - 14 : x(line.batch.at(-1)) + 6, y: right ? at : at + 11, "text-anchor": right ? "end" : "start", class: `line-text${line.chosen ? " chosen" : ""}` }, chart.svg, line.label);
    }
    for (const p of data.points) {
      if (p.choice && data.decision) chart.star(x(p.global_batch_size), y(p.time_s));
      if (p.time_s) chart.target(x(p.global_batch_size), y(p.time_s), note(p));
    }
  };

  const drawMemory = (chart, data) => {
    const { area } = chart, chosen = chosenLine(data);
    const x = batches(chosen.local, area);
    const [left, right] = [chosen.local[0] / 1.12, chosen.local.at(-1) * 1.12];
    const rows = data.measured.filter((row) => row.local_batch_size > left && row.local_batch_size < right);
    const values = known([...chosen.memory, ...rows.map((row) => row.peak_memory_bytes)]);
    if (!values.length) {
      make("text", { x: area.left, y: area.top + 20 }, chart.svg, "no memory was measured");
      return;
    }
    const most = Math.max(...values), limit = data.limit_bytes;
    const top = Math.max(most * 1.12, limit <= most * 8 ? limit * 1.12 : 0);
    const y = linearScale(top, area.bottom, area.top, { most: 6, format: (b) => (b ? bytes(b, 2) : "0") });
    chart.axes(x, y, "batch size of a device", limit > top ? `the limit, ${bytes(limit)}, is far above` : "");
    chart.band(chosen.local.map((b, at) => [x(b), chosen.memory_lower[at] && y(chosen.memory_lower[at]), chosen.memory_upper[at] && y(chosen.memory_upper[at])]));
    chart.curve(chosen.local.map((b, at) => [x(b), chosen.memory[at] === null ? null : y(chosen.memory[at])]), chosen.extrapolated, true);
    if (limit <= top) chart.across(y(limit), `limit ${bytes(limit)}`, true);
    for (const row of rows) {
      if (row.status !== "ok") {
        chart.cross(x(row.local_batch_size), area.bottom - 8);
        const device = `${count(row.local_batch_size)} per device on ${plural(row.nodes * row.devices_per_node, "device")}`;
        chart.target(x(row.local_batch_size), area.bottom - 8, [device, row.status === "oom" ? "ran out of memory" : "failed"]);
      } else if (row.peak_memory_bytes) chart.dot(x(row.local_batch_size), y(row.peak_memory_bytes), same(row, chosen) ? "chosen" : "", 4.5);
    }
    for (const p of data.points.filter((one) => same(one, chosen) && one.peak_memory_bytes)) {
      if (p.choice && data.decision) chart.star(x(p.local_batch_size), y(p.peak_memory_bytes));
      chart.target(x(p.local_batch_size), y(p.peak_memory_bytes), note(p));
    }
  };

  const drawPareto = (chart, data) => {
    const { area } = chart;
    const points = data.points.filter((p) => p.fits && p.time_s);
    const priced = points.every((p) => p.cost_usd !== null);
    const worth = (p) => (priced ? p.cost_usd : p.device_hours);
    $("chart-pareto-title").textContent = priced ? "Time against cost" : "Time against device hours";
    if (!points.length) return;
    const costs = points.map(worth);
    const wide = data.budget_usd && priced ? [...costs, data.budget_usd] : costs;
    const format = (value) => (priced ? money(value) : digits(value, 3));
    const x = logScale(Math.min(...wide) * .8, Math.max(...wide) * 1.25, area.left, area.right, { ticks: decades(), most: Math.max(3, (area.right - area.left) / 64), unit: () => 1, format });
    const times = points.map((p) => p.time_s);
    const y = seconds(data.deadline_s ? [...times, data.deadline_s] : times, area, 6);
    chart.axes(x, y, priced ? `cost of ${data.basis}` : `device hours of ${data.basis}`, "time");
    if (data.deadline_s) chart.across(y(data.deadline_s), `deadline ${time(data.deadline_s, 2)}`, true);
    const front = points.filter((p) => p.on_pareto).sort((a, b) => a.time_s - b.time_s);
    const steps = front.flatMap((p, at) => (at ? [[x(worth(p)), y(front[at - 1].time_s)]] : []).concat([[x(worth(p)), y(p.time_s)]]));
    if (steps.length > 1) make("path", { d: steps.map(([a, b], at) => `${at ? "L" : "M"}${a} ${b}`).join(""), class: "front" }, chart.inner);
    for (const p of points.filter((one) => !one.choice || !data.decision)) {
      chart.dot(x(worth(p)), y(p.time_s), p.on_pareto ? "pareto" : p.meets_limits ? "" : "hollow", p.on_pareto ? 5 : 3.5);
    }
    for (const p of points) {
      if (p.choice && data.decision) chart.star(x(worth(p)), y(p.time_s));
      chart.target(x(worth(p)), y(p.time_s), note(p));
    }
  };

  const legend = (data) => {
    const entry = (text, draw) => {
      const box = document.createElement("span"), svg = make("svg", { viewBox: "0 0 22 12" });
      draw(svg);
      box.append(svg, text);
      return box;
    };
    const line = (kind) => (svg) => make("path", { d: "M1 6H21", class: kind }, svg);
    $("legend").replaceChildren(
      entry("choice", (svg) => make("circle", { cx: 11, cy: 6, r: 5, class: "star" }, svg)),
      entry("measured", (svg) => make("circle", { cx: 11, cy: 6, r: 4.5, class: "dot chosen" }, svg)),
      entry(`predicted, with its ${digits(100 * data.level)} % band`, (svg) => { make("rect", { x: 1, y: 1, width: 20, height: 10, class: "band" }, svg); line("curve chosen")(svg); }),
      entry("beyond what was measured", line("curve chosen dashed")),
      entry("Pareto front", (svg) => { line("front")(svg); make("circle", { cx: 11, cy: 6, r: 4, class: "dot pareto" }, svg); }),
    );
  };

  const charts = [
    new Chart($("chart-time"), drawTime, "Time by global batch size"),
    new Chart($("chart-memory"), drawMemory, "Memory of a device by its batch size"),
    new Chart($("chart-pareto"), drawPareto, "Time against cost of every candidate"),
  ];
  const bounds = (data) => {
    const times = known(data.points.map((p) => p.time_s));
    if (!times.length) return;
    span = [Math.min(...times) / 3, Math.max(...times) * 2];
    if (asked.deadline) $("deadline").value = deadlinePosition(asked.deadline);
  };
  const show = (data) => {
    if (document.activeElement !== $("deadline")) bounds(data);
    decide(data);
    legend(data);
    $("chart-time-title").textContent = data.basis === "to target" ? "Time to the target by batch size" : "Time by batch size";
    for (const chart of charts) chart.show(data);
    table(data);
    $("tula").dataset.ready = String(Number($("tula").dataset.ready || 0) + 1);
  };

  read();
  choices();
  show(first);
  write();
  listen();
})();
