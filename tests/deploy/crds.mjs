// Validates custom resources against the schemas of their CRDs, which npm packages contain. Unknown fields are not found.
//
//   node crds.mjs NODE_MODULES < resources.json
//
// Prints one line per resource that has a schema: `ok KIND` or `KIND: PROBLEM`. Exits with 1 if there is a problem.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const schemas = {
  ScaledObject: "keda/keda.sh/v1alpha1/ScaledObject.js",
  HTTPRoute: "gateway-api/gateway.networking.k8s.io/v1/HTTPRoute.js",
  PodMonitor: "prometheus-operator/monitoring.coreos.com/v1/PodMonitor.js",
};

for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const { kind } = resource;
  if (!(kind in schemas)) continue;
  const path = resolve(process.argv[2], "@kubernetes-models", schemas[kind]);
  const model = (await import(pathToFileURL(path).href))[kind];
  try {
    new model(resource).validate();
    console.log(`ok ${kind}`);
  } catch (error) {
    console.log(`${kind}: ${error.message}`);
    process.exitCode = 1;
  }
}
