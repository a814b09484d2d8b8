"""Files of records: TFRecord, WebDataset, and how they are opened."""
