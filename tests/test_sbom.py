"""The software bill of materials follows CycloneDX 1.5 and lists what is locked."""

import json
import re

import pytest

from scripts import lock, sbom


@pytest.fixture(scope="module")
def bill():
    return sbom.bill()


def test_it_has_the_required_fields(bill):
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["specVersion"] == "1.5"
    assert bill["version"] == 1
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", bill["serialNumber"])
    assert bill.keys() <= {
        "bomFormat", "specVersion", "version", "serialNumber", "metadata", "components", "dependencies",
    }  # fmt: skip
    for entry in [bill["metadata"]["component"], *bill["components"]]:
        assert entry["type"] in {"library", "application"}
        assert entry["name"]
        assert entry["version"]
        assert entry.get("scope", "required") in {"required", "optional"}
        assert entry.keys() <= {"type", "bom-ref", "name", "version", "scope", "hashes", "licenses", "purl"}


def test_licences_are_one_expression_or_names(bill):
    for entry in bill["components"]:
        stated = entry.get("licenses", [{"expression": "none"}])
        assert stated
        names = all(licence.keys() == {"license"} and licence["license"].keys() == {"name"} for licence in stated)
        assert names or (len(stated) == 1 and stated[0].keys() == {"expression"}), entry["name"]
    assert sum("licenses" in entry for entry in bill["components"]) > 100


def test_references_are_unique_and_lead_somewhere(bill):
    references = [bill["metadata"]["component"]["bom-ref"], *(entry["bom-ref"] for entry in bill["components"])]
    assert len(set(references)) == len(references)
    for relation in bill["dependencies"]:
        assert {relation["ref"], *relation["dependsOn"]} <= set(references)


def test_it_lists_every_pin_with_every_hash_and_torch_without(bill):
    text = {name: (lock.FOLDER / f"{name}.txt").read_text() for name in (*lock.EXTRAS, "torch")}
    pinned = {found for file in text.values() for found in re.findall(r"^([\w.-]+)==([^\s;]+)", file, re.MULTILINE)}
    assert {(entry["name"], entry["version"]) for entry in bill["components"]} == pinned
    hashes = {found for file in text.values() for found in re.findall(r"sha256:([0-9a-f]{64})", file)}
    listed = [found for entry in bill["components"] for found in entry.get("hashes", [])]
    assert {found["content"] for found in listed} == hashes
    assert {found["alg"] for found in listed} == {"SHA-256"}
    assert [entry["name"] for entry in bill["components"] if "hashes" not in entry] == ["torch"]
    required = {entry["name"] for entry in bill["components"] if entry["scope"] == "required"}
    assert required == {"torch", *re.findall(r"^([\w.-]+)==", text["run"], re.MULTILINE)}


def test_it_is_the_same_every_time_and_names_no_place(bill):
    assert sbom.bill() == bill
    assert not re.search(r"\w://|timestamp", json.dumps(bill))
