"""The bytes that units keep and that compiled steps hold."""
