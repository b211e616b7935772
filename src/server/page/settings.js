// The settings dialog. A change applies at once; there is no button to save.

import { exportText, importText } from "./conversation.js";
import { byId, download } from "./dom.js";
import { askForKey } from "./key.js";
import { forgetKey, loadKey, saveSettings } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["system", "reasoning_effort", "theme"];

/** Sets up the dialog. It changes the object `settings`, and exports and imports the conversations in `store`. */
export function initSettings(settings, store, onImport) {
  const dialog = byId("settings");
  const { elements } = dialog.querySelector("form");
  for (const name of [...NUMBERS, ...TEXTS]) elements[name].value = settings[name] ?? "";
  applyTheme(settings.theme);

  dialog.addEventListener("input", ({ target }) => {
    if (NUMBERS.includes(target.name)) {
      if (!target.reportValidity()) return;
      settings[target.name] = target.value === "" ? null : target.valueAsNumber;
    } else if (TEXTS.includes(target.name)) {
      settings[target.name] = target.value;
    }
    applyTheme(settings.theme);
    saveSettings(settings);
  });
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });

  byId("export-all").addEventListener("click", async () => {
    download("conversations.json", exportText(await store.all()));
  });
  byId("import").addEventListener("click", () => byId("import-input").click());
  byId("import-input").addEventListener("change", async ({ target }) => {
    const [file] = target.files;
    byId("transfer").textContent = file ? await importFile(file, store) : "";
    target.value = "";
    onImport();
  });

  byId("enter-key").addEventListener("click", async () => {
    await askForKey(loadKey());
    showKey();
  });
  byId("forget-key").addEventListener("click", () => {
    forgetKey();
    showKey();
  });
}

/** Opens the dialog. */
export function openSettings() {
  byId("transfer").textContent = "";
  showKey();
  byId("settings").showModal();
}

function showKey() {
  byId("forget-key").disabled = loadKey() === null;
}

async function importFile(file, store) {
  try {
    const conversations = importText(await file.text());
    for (const conversation of conversations) await store.save(conversation);
    return conversations.length === 1 ? "Imported 1 conversation." : `Imported ${conversations.length} conversations.`;
  } catch (error) {
    return `Cannot import ${file.name}: ${error.message}.`;
  }
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
