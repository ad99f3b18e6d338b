"""Go on with a stream at another worker when the one that answers dies.

A language model's next token depends on nothing but the tokens before it. So what a dead worker has computed
is lost, and what it has sent is not: the prompt followed by the text that the client has got already is a
prompt whose answer is the rest. Four steps follow from that.

1. **Keep** (``partial_answers``). While a stream passes, its events are kept as bytes. They are parsed only
   when the worker dies, or when all streams have kept too many, into the text that they hold.
2. **Ask** (``continuing``). Another worker gets the client's request with the partial answer at the end of
   its prompt: as the beginning of a completion's prompt, or as an unfinished message of the assistant that
   the engine is told to continue. The limits of tokens shrink by the tokens that are there.
3. **Splice** (``splicing``). The new stream's events get the id and the time of the first one, its second
   role is left out, and its usage is added up.
4. **Mind the seam.** Chat templates strip the white space at a message's end, and a text that ends within
   a token is continued badly. So the white space at the end of the partial answer is not sent, and is left
   out of the continuation's beginning when it comes there again.

With greedy decoding the spliced text is that of an uncut answer, but for differences in rounding between two
workers; with a temperature it is another sample that agrees with the first one up to the seam. A request
whose rest depends on more than the text so far does not migrate: ``continuing.obstacle`` lists those.
"""
