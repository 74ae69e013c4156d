"""Data sets, tokenizers and samplers.

Five data sets are built in: `digits` (images), `tones` (sound), `number_words` (translation), `python_text`, and
`biographies` (texts and questions). All other data sets are read from a path. A package that only one data set needs is
imported when this data set is used.
"""

from regard.data.birthplaces_dataset import (
    BirthplaceQuestion as BirthplaceQuestion,
    Birthplaces as Birthplaces,
    read_birthplaces as read_birthplaces,
)
from regard.data.byte_pairs import BytePairTokenizer as BytePairTokenizer
from regard.data.characters import CharacterTokenizer as CharacterTokenizer
from regard.data.digit_strings import DigitStrings as DigitStrings
from regard.data.digits import digits as digits
from regard.data.image_formats import read_images as read_images
from regard.data.images import Images as Images
from regard.data.log_mel import LogMel as LogMel, LogMelStream as LogMelStream, log_mel as log_mel
from regard.data.number_words import number_pairs as number_pairs, number_words as number_words
from regard.data.plain_text import read_text as read_text
from regard.data.python_text import python_text as python_text
from regard.data.resample import resample as resample
from regard.data.sampler import (
    LengthBuckets as LengthBuckets,
    ShuffledOrder as ShuffledOrder,
    sampler_generator as sampler_generator,
)
from regard.data.sentence_pairs import SentencePairs as SentencePairs, read_sentence_pairs as read_sentence_pairs
from regard.data.splits import random_split as random_split
from regard.data.spoken_digits import (
    Recordings as Recordings,
    make_digit_strings as make_digit_strings,
    read_spoken_digits as read_spoken_digits,
)
from regard.data.synthetic_biographies import Biographies as Biographies, biographies as biographies
from regard.data.tokenizers import (
    ByteTokenizer as ByteTokenizer,
    Tokenizer as Tokenizer,
    load_tokenizer as load_tokenizer,
    tokenizer_from_json as tokenizer_from_json,
)
from regard.data.tones import tones as tones
