#!/usr/bin/env bash
# What action.yml runs: the suite against $TESTEE, with reports in $REPORTS. The other variables may be empty.
set -euo pipefail
: "${TESTEE:?the command of the testee}" "${REPORTS:?a folder for reports}"
mkdir -p "$REPORTS"
args=(run --report "$REPORTS/report.json" --html "$REPORTS/report.html" --junit "$REPORTS/junit.xml" --badge "$REPORTS/badge.json")
for option in role level live-source live-sink baseline; do
  name=$(tr a-z- A-Z_ <<< "$option")
  [ -z "${!name:-}" ] || args+=("--$option" "${!name}")
done
for extension in ${EXTENSIONS:-}; do
  args+=(--extension "$extension")
done
read -ra command <<< "$TESTEE"
exec kvproto-conformance "${args[@]}" -- "${command[@]}"
