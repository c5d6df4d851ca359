// A filter above the tables of clauses. Without it, the page is the plain tables.
(() => {
  const rows = [...document.querySelectorAll("tr[data-role]")];
  if (!rows.length) return;
  const values = (name) => [...new Set(rows.map((row) => row.dataset[name]))];
  const choices = {
    sides: ["everyone", [["source", "a source"], ["sink", "a sink"]]],
    role: ["every role", values("role").sort().map((v) => [v, v])],
    profile: ["every profile", values("profile").map((v) => [v, v])],
    page: ["every page", values("page").sort().map((v) => [v, v])],
  };
  const titles = { sides: "kept by", role: "role", profile: "profile", page: "page" };
  const form = document.createElement("form");
  form.className = "clause-filter";
  for (const [name, [all, options]] of Object.entries(choices)) {
    const select = document.createElement("select");
    select.name = name;
    select.append(new Option(all, ""), ...options.map(([value, text]) => new Option(text, value)));
    const label = document.createElement("label");
    label.append(titles[name], select);
    form.append(label);
  }
  const label = document.createElement("label");
  const words = Object.assign(document.createElement("input"), { type: "search", name: "words" });
  label.append("words", words);
  const count = document.createElement("output");
  form.append(label, count);
  const sections = [...new Set(rows.map((row) => row.closest("table")))].map((table) => {
    let head = table;
    while (head && head.tagName !== "H2") head = head.previousElementSibling || head.parentElement;
    return [head, table.closest(".md-typeset__scrollwrap") || table, table];
  });
  const apply = () => {
    const asked = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = Object.keys(choices).every((name) => {
        const value = form.elements[name].value;
        return !value || row.dataset[name].split(name === "sides" ? " " : "\n").includes(value);
      });
      const text = row.textContent.toLowerCase();
      row.hidden = !(fits && asked.every((word) => text.includes(word)));
      shown += row.hidden ? 0 : 1;
    }
    for (const [head, wrap, table] of sections) {
      const empty = ![...table.querySelectorAll("tr[data-role]")].some((row) => !row.hidden);
      head.hidden = wrap.hidden = empty;
    }
    count.value = `${shown} of ${rows.length} clauses`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  sections[0][0].before(form);
  apply();
})();
