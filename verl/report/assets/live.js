// While the page is served: load it again when the run has gone on, unless somebody reads a token or types.
let follows = true;
async function watch() {
  try {
    const version = await (await fetch("/version", { cache: "no-store" })).text();
    if (follows && version !== data.version && byId("tip").hidden && !document.activeElement.closest("input[type=search]")) {
      location.reload();
      return;
    }
  } catch {
    byId("live-state").textContent = " the server does not answer";
  }
  setTimeout(watch, 3000);
}

const liveBox = el("input", { type: "checkbox" });
liveBox.checked = true;
liveBox.addEventListener("change", () => { follows = liveBox.checked; });
byId("live").append(el("label", {}, liveBox, " follow the run"), el("span", { id: "live-state" }));
byId("live").hidden = false;
watch();
