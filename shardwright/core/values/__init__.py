"""The values that users give and read: fields with their ranges and words, amounts with their units, text files."""
