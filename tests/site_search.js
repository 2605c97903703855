// What the built site's search page shows: Sphinx's own scripts and index, without a browser.
// node site_search.js HTML_FOLDER < queries, one a line: for each a line of JSON, its results from the first on.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const page = vm.createContext({
  document: { getElementById: () => null },
  localStorage: { setItem: () => {} },
  SPHINX_HIGHLIGHT_ENABLED: false,
  DOCUMENTATION_OPTIONS: {},
  _: (text) => text,
  _ready: () => {},
});
page.window = page;
// In the order of search.html.
for (const name of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), page, name);

const search = vm.runInContext("(query) => Search._performSearch(...Search._parseQuery(query))", page);
for (const query of fs.readFileSync(0, "utf8").split("\n").filter(Boolean)) {
  const results = search(query).reverse(); // the page shows the last one first
  console.log(JSON.stringify(results.map(([file, title, anchor, , score, , kind]) => ({ file, title, anchor, score, kind }))));
}
