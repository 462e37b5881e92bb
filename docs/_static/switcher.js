/* Puts a list of versions under the title of the sidebar, if there is more than one. */
document.addEventListener("DOMContentLoaded", () => {
  const names = Object.keys(VERSIONS);
  const title = document.querySelector(".bd-sidebar-primary .sidebar-primary-item");
  if (names.length < 2 || !title) {
    return;
  }
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const page = location.href.split(/[?#]/)[0].slice(root.href.length) || "index.html";
  const here = root.pathname.split("/").at(-2);
  const select = document.createElement("select");
  select.className = "form-select form-select-sm version-switcher";
  select.setAttribute("aria-label", "Version");
  for (const name of names) {
    const text = name === names[0] ? `${name} (latest)` : name;
    select.add(new Option(text, name, false, name === here));
  }
  select.addEventListener("change", () => {
    const target = VERSIONS[select.value].includes(page) ? page : "index.html";
    location.href = new URL(`../${select.value}/${target}`, root).href;
  });
  title.append(select);
});
