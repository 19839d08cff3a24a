// Filters the rows of the tables below a <div class="filter" data-kinds="a,b">: by words, and by a kind in the row.
function makeFilter(place) {
  if (place.childElementCount) return;
  const kinds = place.dataset.kinds.split(",");
  const rows = [];
  const tables = [];
  for (const table of document.querySelectorAll(".md-content table")) {
    if (!(place.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
    tables.push(table);
    let first = ""; // an empty first cell repeats the one above it
    for (const row of table.querySelectorAll("tbody tr")) {
      const head = row.cells[0].textContent.trim();
      first = head || first;
      rows.push({ row, cell: row.cells[0], repeated: head ? "" : first, text: `${first} ${row.textContent}`.toLowerCase() });
    }
  }
  const words = document.createElement("input");
  words.type = "search";
  words.placeholder = "Filter by words";
  words.setAttribute("aria-label", "Filter the tables by words");
  const kind = document.createElement("select");
  kind.setAttribute("aria-label", "Filter the tables by result");
  for (const name of ["all", ...kinds]) kind.add(new Option(name === "all" ? "every result" : name, name));
  const count = document.createElement("output");
  place.append(words, kind, count);

  function apply() {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const entry of rows) {
      const cells = [...entry.row.cells].map((cell) => cell.textContent.replace(/\s/g, " ").replace(/^[^\w]+/, ""));
      const fits = kind.value === "all" || cells.some((cell) => cell.startsWith(kind.value));
      const visible = fits && wanted.every((word) => entry.text.includes(word));
      entry.row.hidden = !visible;
      if (entry.repeated) entry.cell.textContent = wanted.length || kind.value !== "all" ? entry.repeated : "";
      shown += visible;
    }
    for (const table of tables) table.hidden = ![...table.tBodies[0].rows].some((row) => !row.hidden);
    count.textContent = `${shown} of ${rows.length}`;
  }
  words.addEventListener("input", apply);
  kind.addEventListener("change", apply);
  apply();
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".filter").forEach(makeFilter));
