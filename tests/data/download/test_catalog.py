"""The catalog is consistent."""

from normfree.data.download.catalog import DATA_SETS


def test_published_checksums_are_well_formed() -> None:
    for data in DATA_SETS.values():
        sums = [*(layout.files for layout in data.layouts), *(source.downloads for source in data.sources)]
        for checksum in (one for mapping in sums for one in mapping.values()):
            digest = checksum.sha256 or checksum.md5
            assert len(digest) == (64 if checksum.sha256 else 32)
            assert int(digest, 16)
        assert all(source.layout is data.layouts[0] for source in data.sources)  # what `get` stores, `load` finds first
        assert len(data.classes) == len(set(data.classes)) == (100 if data.name == "cifar100" else 10)
        assert all(checksum.sha256 for source in data.sources for checksum in source.downloads.values())
