// Marks tables wider than the page: extra.css gives them equal columns, or on a phone shows them as lists, each cell after
// the name of its column.
function markWideTables() {
  for (const table of document.querySelectorAll("article table:not([class])")) {
    delete table.dataset.wide;
    if (table.offsetWidth > table.closest("li, article").clientWidth) table.dataset.wide = "";
  }
}

for (const row of document.querySelectorAll("article table:not([class]) tbody tr")) {
  const heads = row.closest("table").tHead?.rows[0].cells ?? [];
  // Of two columns, the first is the title of the second.
  if (heads.length > 2) [...row.cells].forEach((cell, i) => (cell.dataset.head = heads[i].innerText));
}

// A long name breaks behind a dot or an underscore, not within a word nor near its beginning. A date stays in one line.
for (const name of document.querySelectorAll("article :is(td code, .doc-object-name)")) {
  const parts = name.innerHTML.split(name.matches("td code") ? /(?<=[\w.]{20}[._])(?=\w)/ : /(?<=\w[._])(?=\w)/);
  if (!name.firstElementChild && !/\s/.test(name.innerText) && parts.length > 1) name.innerHTML = parts.join("<wbr>");
}
for (const cell of document.querySelectorAll("article td")) {
  if (/^\d{4}-\d\d-\d\d$/.test(cell.innerText)) cell.style.whiteSpace = "nowrap";
}

// Output in columns does not wrap.
for (const output of document.querySelectorAll(".language-text")) {
  const lines = output.innerText.split("\n").filter((line) => /\S {2,}\S/.test(line));
  if (lines.length > 1) output.classList.add("diagram");
}

markWideTables();
addEventListener("resize", markWideTables);
document.fonts.ready.then(markWideTables);
