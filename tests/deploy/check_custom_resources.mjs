// `node check_custom_resources.mjs FOLDER < objects.json`: checks custom resources strictly, with the packages in FOLDER/node_modules.
// Values by their validators (types, patterns, bounds), members by their TypeScript types (no unknown one, no missing one). Prints a
// line for each mistake; exit status 1 if there was one.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};
const folder = resolve(process.argv[2]);
const ts = createRequire(join(folder, "package.json"))("typescript");
const objects = JSON.parse(readFileSync(0, "utf8"));
const mistakes = [];
const source = [];

for (const [number, object] of objects.entries()) {
  const title = `${object.kind} ${object.metadata?.name}`;
  const [group, version] = object.apiVersion.split("/");
  const path = `@kubernetes-models/${PACKAGES[group]}/${group}/${version}/${object.kind}`;
  try {
    const module = await import(pathToFileURL(join(folder, "node_modules", `${path}.js`)));
    new module[object.kind](object).validate();
  } catch (error) {
    mistakes.push(`${title}: ${error.message}`);
    continue;
  }
  source.push(`import type { I${object.kind} as T${number} } from "${path}";`);
  source.push(`export const v${number}: T${number} = ${JSON.stringify(object)};`);
}

const file = join(folder, `objects-${process.pid}.ts`);
const host = ts.createCompilerHost({});
const [read, exists] = [host.getSourceFile, host.fileExists];
host.fileExists = (name) => name === file || exists(name);
host.getSourceFile = (name, ...rest) =>
  name === file ? ts.createSourceFile(name, source.join("\n"), rest[0]) : read(name, ...rest);
const options = {
  noEmit: true,
  strict: true,
  skipLibCheck: true,
  types: [],
  target: ts.ScriptTarget.ES2022,
  module: ts.ModuleKind.NodeNext,
  moduleResolution: ts.ModuleResolutionKind.NodeNext,
};
for (const diagnostic of ts.getPreEmitDiagnostics(ts.createProgram([file], options, host))) {
  mistakes.push(ts.flattenDiagnosticMessageText(diagnostic.messageText, " "));
}
for (const mistake of mistakes) console.log(mistake);
process.exitCode = mistakes.length > 0 ? 1 : 0;
