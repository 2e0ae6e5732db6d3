// SPDX-License-Identifier: BSD-3-Clause
//
// Downloads one artifact, or all that match a pattern. Each of several artifacts gets a folder of its name, unless they are
// merged. A single one gets no folder. actions/download-artifact v8 does the same.
import path from 'node:path';
import { DefaultArtifactClient } from '@actions/artifact';
import { minimatch } from 'minimatch';

const { NAME, PATTERN, FOLDER, MERGE_MULTIPLE } = process.env;
const client = new DefaultArtifactClient();

const listed = (await client.listArtifacts({ latest: true })).artifacts;
const wanted = listed.filter(({ name }) => (NAME ? name === NAME : minimatch(name, PATTERN || '*')));
if (NAME && wanted.length === 0) {
  console.log(`there is no artifact ${NAME}, only ${listed.map(({ name }) => name).join(', ')}`);
  process.exit(1);
}
const flat = NAME || MERGE_MULTIPLE === 'true' || wanted.length === 1;
for (const { id, name, digest } of wanted) {
  const place = path.resolve(flat ? FOLDER : path.join(FOLDER, name));
  const { digestMismatch } = await client.downloadArtifact(id, { path: place, expectedHash: digest });
  if (digestMismatch) {
    console.log(`${name} is not what was uploaded`);
    process.exit(1);
  }
  console.log(`${name} in ${place}`);
}
