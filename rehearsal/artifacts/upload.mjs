// SPDX-License-Identifier: BSD-3-Clause
//
// Uploads the matching files as an artifact. Its paths are relative to the named folder, or to the folder before the first
// wildcard, or, of several paths, to their deepest common folder. Hidden files are left out.
import path from 'node:path';
import fs from 'node:fs';
import { DefaultArtifactClient } from '@actions/artifact';
import * as glob from '@actions/glob';

const { NAME, SEARCH, IF_NO_FILES_FOUND } = process.env;
const client = new DefaultArtifactClient();

function commonFolder(folders) {
  const parts = folders.map((folder) => folder.split(path.sep));
  const length = parts[0].findIndex((part, depth) => parts.some((other) => other[depth] !== part));
  return (length < 0 ? parts[0] : parts[0].slice(0, length)).join(path.sep) || path.sep;
}

const globber = await glob.create(SEARCH, { excludeHiddenFiles: true });
const found = (await globber.glob()).filter((file) => fs.statSync(file).isFile());
if (found.length === 0) {
  console.log(`no file is ${SEARCH}`);
  process.exit(IF_NO_FILES_FOUND === 'error' ? 1 : 0);
}
const searched = globber.getSearchPaths();
const named = searched.length === 1 ? searched[0] : commonFolder(searched);
const root = found.length === 1 && found[0] === named ? path.dirname(named) : named;
const { size } = await client.uploadArtifact(NAME, found, root, {});
console.log(`${NAME}: ${found.length} files of ${root}, ${size} bytes`);
