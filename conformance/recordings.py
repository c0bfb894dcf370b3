"""Cases and recordings of a suite, and what differs between a recording and a run.

A suite keeps one file, `cases.jsonl`: a line per case, {"case": {...}, "recorded": {...}}. A recording that is another
one with changes holds only those ("like" and "change"), and text or lists that repeat one thing are written as
{"$times": N, "$of": thing}, so that all suites together stay a few megabytes.
"""
import json
import os

WORTH = 200  # characters that a repetition must save before it is folded


def fold(value):
    if isinstance(value, str):
        return {"$times": len(value), "$of": value[0]} if len(value) > WORTH and value == value[0] * len(value) else value
    if isinstance(value, list):
        if len(value) > 3 and all(item == value[0] for item in value) and len(json.dumps(value)) > WORTH:
            return {"$times": len(value), "$of": fold(value[0])}
        return [fold(item) for item in value]
    return {key: fold(item) for key, item in value.items()} if isinstance(value, dict) else value


def unfold(value):
    if isinstance(value, dict):
        if set(value) == {"$times", "$of"}:
            thing = unfold(value["$of"])
            folded_text = isinstance(value["$of"], str) and len(value["$of"]) == 1
            return thing * value["$times"] if folded_text else [thing] * value["$times"]
        return {key: unfold(item) for key, item in value.items()}
    return [unfold(item) for item in value] if isinstance(value, list) else value


def changes(base, new, path="", found=None):
    """What turns base into new: {"set": {JSON pointer: value}, "remove": [pointer]}. Lists of unequal length are set whole."""
    found = found if found is not None else {"set": {}, "remove": []}
    if isinstance(base, dict) and isinstance(new, dict):
        for key in sorted(set(base) | set(new)):
            where = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in new:
                found["remove"].append(where)
            elif key not in base:
                found["set"][where] = new[key]
            else:
                changes(base[key], new[key], where, found)
    elif isinstance(base, list) and isinstance(new, list) and len(base) == len(new):
        for i, pair in enumerate(zip(base, new)):
            changes(*pair, f"{path}/{i}", found)
    elif json.dumps(base) != json.dumps(new):
        found["set"][path] = new
    return found


def apply(base, change):
    result = json.loads(json.dumps(base))
    for path in change["remove"] + list(change["set"]):
        *parents, last = [p.replace("~1", "/").replace("~0", "~") for p in path.split("/")[1:]]
        node = result
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        last = int(last) if isinstance(node, list) else last
        if path in change["set"]:
            node[last] = change["set"][path]
        else:
            del node[last]
    return result


def load(folder):
    """({name: case}, {name: recorded})."""
    cases, raw = {}, {}
    with open(os.path.join(folder, "cases.jsonl"), encoding="utf-8") as lines:
        for line in lines:
            entry = unfold(json.loads(line))
            name = entry["case"]["name"]
            if name in cases:
                raise SystemExit(f"{folder}: two cases are named {name}")
            cases[name] = entry["case"]
            if "recorded" in entry:
                raw[name] = entry["recorded"]
            elif "change" in entry:
                raw[name] = entry
    recorded = {}
    for name, entry in raw.items():
        whole = isinstance(entry, dict) and "change" in entry and "like" in entry
        recorded[name] = apply(raw[entry["like"]], entry["change"]) if whole else entry
    return cases, recorded


def save(folder, cases, recorded):
    """Writes the file beside the old one and renames it. The largest saving decides what a recording is kept like."""
    beside = os.path.join(folder, "cases.jsonl.new")
    base = next((name for name in cases if isinstance(recorded.get(name), dict)), None)
    with open(beside, "w", encoding="utf-8") as out:
        for name, case in cases.items():
            entry = {"case": case}
            got = recorded.get(name)
            if got is not None:
                entry["recorded"] = got
                if base not in (None, name) and isinstance(got, dict):
                    change = changes(recorded[base], got)
                    if len(json.dumps(change)) * 2 < len(json.dumps(got)):
                        del entry["recorded"]
                        entry |= {"like": base, "change": change}
            out.write(json.dumps(fold(entry), ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n")
    os.replace(beside, os.path.join(folder, "cases.jsonl"))


def difference(want, got, path=""):
    """The first difference as text, or None. Strict about JSON types (true is not 1)."""
    if isinstance(want, dict) and isinstance(got, dict):
        for key in ("refused", "failed", "dropped", "no_answer", "harness_error"):  # says more than what follows from it
            if key in got and key not in want:
                return f"{path}: {key} {short(got[key])}"
        for key in sorted(set(want) | set(got)):
            if key not in got:
                return f"{path}.{key}: missing, want {short(want[key])}"
            if key not in want:
                return f"{path}.{key}: unexpected {short(got[key])}"
            found = difference(want[key], got[key], f"{path}.{key}")
            if found:
                return found
        return None
    if isinstance(want, list) and isinstance(got, list):
        for i, (a, b) in enumerate(zip(want, got)):
            found = difference(a, b, f"{path}[{i}]")
            if found:
                return found
        return None if len(want) == len(got) else f"{path}: want {len(want)} items, got {len(got)}"
    same = json.dumps(want, sort_keys=True) == json.dumps(got, sort_keys=True)
    return None if same else f"{path}: want {short(want)}, got {short(got)}"


def short(value):
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 160 else text[:157] + "..."
