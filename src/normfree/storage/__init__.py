"""Files on disk: `reading` (they may be damaged), `writing` (whole or not at all), locks of folders, and provenance."""
