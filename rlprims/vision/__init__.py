"""Images of prompts: read and checked, in the model's prompt, and as its inputs. Nothing else imports Pillow."""
