"""The words of `workers.environments.wordle`: common English words of five letters, written down for this project."""

from __future__ import annotations

_TEXT = """
about above abuse actor acute admit adopt adult after again agent agree ahead alarm album alert alike alive allow alone
along alter amber among angel anger angle angry ankle apart apple apply april apron arena argue arise armor array arrow
aside asset atlas attic audio audit avoid awake award aware awful bacon badge badly baker banjo basic basin basis batch
beach beard beast began begin being below bench berry birth black blade blame blank blast blaze bleak blend bless blind
block blood bloom board boast bonus boost booth bound brain brake brand brass brave bread break breed brick bride brief
bring broad broke brook broom brown brush build built bunch burst buyer cabin cable camel canal candy canoe cargo carry
carve catch cause cedar chain chair chalk charm chart chase cheap check cheek cheer chess chest chief child chili chill
choir chose civic civil claim class clean clear clerk click cliff climb clock close cloth cloud clown coach coast cobra
cocoa color comet comic coral couch cough could count court cover crack craft crane crash crawl crazy cream creek crest
crime crisp cross crowd crown cruel crush curve cycle daily dairy daisy dance dealt death debut decay delay dense depth
diary diner dirty ditch diver dodge doing donor doubt dough draft drain drama drank drawn dream dress dried drift drill
drink drive drown dusty dwarf eager eagle early earth easel eaten eight elbow elder elect elite empty enemy enjoy enter
entry equal error essay event every exact exist extra fable faint fairy faith false fancy fault favor feast fence ferry
fetch fever fiber field fiery fifth fifty fight final first flame flash fleet flesh float flock flood floor flour fluid
flute focus force forge forth forty forum found frame fraud fresh front frost frown fruit fully funny gauge ghost giant
given glass gleam globe glory glove going grace grade grain grand grant grape graph grasp grass grave gravy great green
greet grief grill grind group grove grown guard guess guest guide guild habit happy harsh haste haunt heart heavy hedge
hello hence hinge hobby honey honor horse hotel house human humor hurry ideal image imply index inner input irony issue
ivory jelly jewel joint joker jolly judge juice juicy kayak knead kneel knife knock known koala label labor large laser
later laugh layer learn lease least leave lemon level lever light limit linen liver lobby local lodge logic loose lorry
lover lower loyal lucky lunar lunch lyric magic major maker mango maple march marry match maybe mayor medal media melon
mercy merge merit merry metal meter midst might minor minus mixed model moist money month moral motor mount mouse mouth
movie muddy music naive naval nerve never newly night noble noise north novel nurse nylon oasis ocean offer often olive
onion opera orbit order organ other otter ought ounce outer owner oxide paint panda panel panic paper party pasta paste
patch pause peace peach pearl pedal penny phase phone photo piano piece pilot pinch pitch pivot pizza place plain plane
plant plate plaza point polar porch pouch pound power press price pride prime print prior prize probe proof proud prove
pulse punch pupil puppy purse quack queen quest queue quick quiet quilt quite quota quote radar radio raise rally ranch
range rapid ratio raven reach react ready realm rebel refer reign relax reply rider ridge rifle right rigid rival river
roast robin robot rocky roman rough round route rover royal rugby ruler rural saint salad salon sandy sauce scale scare
scarf scene scent scoop scope score scout screw seize sense serve seven shade shake shall shape share shark sharp sheep
sheet shelf shell shift shine shiny shirt shock shoot shore short shout shown siege sight silly since sixth sixty skate
skill skirt skull slate sleep slice slide slope small smart smell smile smoke snack snail snake sneak snowy sober solar
solid solve sorry sound south space spade spare spark speak spear speed spell spend spice spicy spill spine spoke spoon
sport spray squad stack staff stage stain stair stake stamp stand stare start state steal steam steel steep steer stern
stick stiff still sting stock stone stool store storm story stove straw strip study stuff style sugar suite sunny super
surge swamp swear sweat sweep sweet swept swift swing sword syrup table taken taste teach teeth tempo tenth thank theft
their theme there thick thief thing think third thorn those three threw throw thumb tiger tight timer tired title toast
today token tooth topic torch total touch tough tower toxic trace track trade trail train trash tread treat trend trial
tribe trick troop truck truly trunk trust truth tulip tunic twice twist ultra uncle under unify union unite unity until
upper upset urban usage usual vague valid value valve vapor vault video villa vinyl viola virus visit vital vivid vocal
voice voter wagon waist waste watch water weary weave wedge weigh weird whale wheat wheel where which while white whole
whose widen width witch woman world worry worse worst worth would wound woven wrist write wrong yacht yeast yield young
youth zebra
"""
WORDS = tuple(_TEXT.split())
