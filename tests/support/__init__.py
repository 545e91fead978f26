"""What tests share: cases, references, and stand-ins for what is slow to start. Import it as ``tests.support``."""
