// Takes the screenshots for the documentation.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { Browser } from "./browser.mjs";
import { MockServer } from "./mock_server.mjs";

const QUESTIONS = ["Compare INT8 and FP8 weights", "Draft a commit message for this diff", "What does the prefix cache do?"];

/** Writes page-light.png, page-server.png and page-phone.png into a folder. */
export async function takePictures(folder) {
  const server = await new MockServer().listen();
  server.delay = 6;
  const browser = new Browser();
  const page = await browser.newPage();
  const save = async (name) => writeFileSync(join(folder, name), await page.screenshot());

  await page.emulate({ "prefers-color-scheme": "light" });
  await page.resize(1280, 860);
  await page.goto(server.url);
  for (const question of QUESTIONS) {
    await ask(page, question);
    await page.press("Control+k");
    await page.type("new conversation");
    await page.press("Enter");
  }
  await ask(page, "Explain how paged attention works.");
  await page.evaluate(() => { document.getElementById("scroller").scrollTop = 0; });
  await settle();
  await save("page-light.png");

  await page.emulate({ "prefers-color-scheme": "dark" });
  await page.click("#toggle-server");
  await settle(62_000); // a full minute of samples
  await page.evaluate(() => { document.getElementById("scroller").scrollTop = 1e6; });
  await settle();
  await save("page-server.png");

  await page.click("#toggle-server");
  await page.resize(390, 800, { isPhone: true, scale: 2 });
  await page.evaluate(() => { document.getElementById("scroller").scrollTop = 0; });
  await settle();
  await save("page-phone.png");

  await browser.close();
  await server.close();
}

async function ask(page, text) {
  await page.waitFor(() => document.activeElement.id === "prompt");
  await page.type(text);
  await page.press("Enter");
  await page.waitFor(() => document.querySelector(".answer") && !document.querySelector(".answer.running"));
}

function settle(milliseconds = 300) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
