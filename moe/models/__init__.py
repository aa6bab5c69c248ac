"""Model families: one short file each over a shared decoder."""
